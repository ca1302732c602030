//! Templates that take a machine's stack, memory or time where nothing bounds them.

use super::{assert_honest_works, assert_memory_was_bounded, outcome};

/// A namespace's `s`, changed `times` times, then used.
fn grown(first: &str, times: usize, step: &str, then: &str) -> String {
    format!(
        "{{% set ns = namespace(s={first}) %}}{{% for i in range({times}) %}}{{% set ns.s = {step} %}}{{% endfor \
         %}}{then}"
    )
}

/// An expression evaluated 99,999 times.
fn often(expression: &str) -> String {
    format!(
        "{{% set l = range(9999)|list %}}{{% set s = 'ab' * 100000 %}}{{% for i in range(99999) %}}{{% set x = \
         {expression} %}}{{% endfor %}}"
    )
}

/// What compiling takes.
fn compile_bombs() -> Vec<String> {
    let around =
        |before: &str, middle: &str, after: &str, n: usize| format!("{}{middle}{}", before.repeat(n), after.repeat(n));
    let shown = |expression: String| format!("{{{{ {expression} }}}}");
    // As many as a template of this size may have: the stack. Fewer: what is quadratic.
    let many = |piece: &str| piece.repeat((250 << 10) / piece.len());
    let mut all: Vec<String> =
        ["not ", "-", "1 if 1 else ", "1 + ", "1 ** ", "[0] and "].map(|before| shown(many(before) + "1")).into();
    let after = [
        ".b", "|string", "()", "+1", " and 1", " or 1", "~1", "[0:1]", "[0]", "**1", "//1", " in 1", " is odd",
        "|f(1)", "==1", "<1",
    ];
    all.extend(after.map(|after| shown("a".to_string() + &many(after))));
    all.push(shown("a".to_string() + &"+1".repeat(20_000)));
    all.push(format!("{{% if 0 %}}{}{{% endif %}}", many("{% elif 0 %}")));
    let blocks = [
        ("{% if 1 %}", "{% endif %}"),
        ("{% for i in [1] %}", "{% endfor %}"),
        ("{% set x %}", "{% endset %}"),
        ("{% filter upper %}", "{% endfilter %}"),
        ("{% with x = 1 %}", "{% endwith %}"),
        ("{% generation %}", "{% endgeneration %}"),
        ("{% autoescape true %}", "{% endautoescape %}"),
        ("{% if 1 %}{% else %}", "{% endif %}"),
    ];
    all.extend(blocks.map(|(before, after)| around(before, "x", after, 5_000)));
    all.push((0..5_000).map(|i| format!("{{% macro m{i}() %}}")).collect::<String>() + &"{% endmacro %}".repeat(5_000));
    all.push((0..5_000).map(|i| format!("{{% block b{i} %}}")).collect::<String>() + &"{% endblock %}".repeat(5_000));
    all.push("{% call f() %}".repeat(5_000) + &"{% endcall %}".repeat(5_000));
    all.extend(
        [
            ("(", ")"),
            ("[", "]"),
            ("{1:", "}"),
            ("a[", "]"),
            ("f(", ")"),
            ("a|f(", ")"),
            ("f(x=", ")"),
            ("(1 if ", " else 2)"),
            ("a[0:", "]"),
        ]
        .map(|(before, after)| shown(around(before, "1", after, 20_000))),
    );
    all.extend(
        ["{%", "{{", "{#", "{% raw %}", "{%}", "'", "{{ '", "{% for ", "%}{%-"]
            .map(|piece| piece.repeat((250 << 10) / piece.len())),
    );
    all.push("x".repeat(50_000_000));
    all.push("x".repeat((256 << 10) + 1));
    all.push("{{ 1 }}".repeat(36_000));
    all.push(shown(format!("[{}]", "1,".repeat(100_000))));
    all.push(shown("9".repeat(200_000)));
    all.push(shown("a".repeat(200_000)));
    all.push(format!("{{% {} %}}", "a".repeat(200_000)));
    all
}

/// What rendering takes: stack.
fn depth_bombs() -> Vec<String> {
    let uses = [
        "x",
        "{{ ns.s }}",
        "{{ ns.s|tojson }}",
        "{{ ns.s|tojson(indent=2) }}",
        "{{ ns.s == [ns.s] }}",
        "{{ ns.s|pprint }}",
        "{{ ns.s|string|length }}",
        "{{ [ns.s, [ns.s]]|sort }}",
        "{{ [ns.s]|unique|list }}",
        "{{ {ns.s: 1} }}",
        "{{ ns.s in [[ns.s]] }}",
        "{{ ns.s|urlencode }}",
        "{{ raise_exception(ns.s|string) }}",
        "{{ ns.s < [ns.s] }}",
    ];
    let mut all: Vec<String> = uses
        .iter()
        .flat_map(|then| [grown("[]", 90_000, "[ns.s]", then), grown("{}", 90_000, "{'a': ns.s}", then)])
        .collect();
    all.push(grown("[]", 90_000, "[ns.s]|reverse", "{{ ns.s }}"));
    all.push(grown("[]", 90_000, "[ns.s]|map('string')", "{{ ns.s|list }}"));
    all.push(grown("[]", 90_000, "ns.s|chain([1])", "{{ ns.s|list|length }}"));
    all.push(grown("''", 90_000, "ns.s ~ 'x'", "{{ ns.s|length }}"));
    all.push("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into());
    all.push("{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}".into());
    all.push("{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}".into());
    all.push("{% include 'chat_template' %}".into());
    all.push("{% extends 'chat_template' %}{% block a %}{{ super() }}{% endblock %}".into());
    all.push("{% import 'chat_template' as x %}{{ x }}".into());
    all.push("{% block a %}{{ self.a() }}{% endblock %}".into());
    all.push("{% set ns = namespace() %}{% set ns.s = ns %}{{ ns }}".into());
    all
}

/// What rendering takes: memory.
fn memory_bombs() -> Vec<String> {
    let doubled = [
        "ns.s ~ ns.s",
        "ns.s + ns.s",
        "[ns.s, ns.s]|join",
        "ns.s|replace('x', 'xx')",
        "ns.s.replace('x', 'xx')",
        "ns.s * 2",
        "'%s%s'|format(ns.s, ns.s)",
        "'{}{}'.format(ns.s, ns.s)",
        "ns.s|indent(2) ~ ns.s",
        "ns.s.join([ns.s, ns.s])",
    ];
    let mut all: Vec<String> = doubled.map(|step| grown("'x'", 60, step, "x")).into();
    for step in [
        "ns.s + ns.s",
        "ns.s * 2",
        "(ns.s ~ ns.s)|list",
        "ns.s|chain(ns.s)|list",
        "ns.s + ns.s|reverse|list",
        "ns.s|map('string')|list + ns.s",
    ] {
        all.push(grown("[1]", 60, step, "{{ ns.s|length }}"));
    }
    all.push(grown("[1]", 60, "[ns.s, ns.s]", "{{ ns.s|tojson }}"));
    all.push(grown("{}", 60, "{'a': ns.s, 'b': ns.s}", "{{ ns.s|tojson }}"));
    all.push(
        "{% macro f(n) %}{{ caller() if n == 0 else f(n - 1) ~ f(n - 1) }}{% endmacro %}{% call f(40) %}xxxxxxxxxx{% \
         endcall %}"
            .into(),
    );
    let one = [
        "[1]|batch(10**10, 'x')|list",
        "[1]|slice(10**10)|list",
        "'%1000000000000d'|format(1)",
        "'%.1000000000f'|format(1.5)",
        "'x'|indent(10**10)",
        "'{:>10000000000}'.format(1)",
        "'{:.1000000000}'.format(1.5)",
        "'%-1000000000s'|format('x')",
        "'%0999999999999d'|format(1)",
        "'x' * 10**10",
        "'x' * 10**9",
        "[1] * 10**15",
        "[1] * 10**9",
        "range(10**15)|list",
        "range(10**9)",
        "('a' * 10000000)|list",
        "('a,' * 9000000).split(',')",
        "('a\n' * 9000000)|lines|list",
        "('ß' * 90000000)|upper",
        "('&' * 90000000)|escape",
        "('\u{1}' * 90000000)|tojson",
        "('é' * 90000000)|urlencode",
        "[[1] * 100000] * 100000",
        "strftime_now('%B' * 90000000)",
        "raise_exception('x' * 90000000)",
        "messages|tojson(indent=10**10)",
        "'x'|indent(10**18, true, true)",
        "zip(*([range(99999)] * 9999))",
        "[1, 2]|batch(2**62)|list",
        "{'a': 'x' * 90000000}|tojson",
        "('x' * 90000000)|title|capitalize",
        "namespace(a='x' * 2**27)",
        "10**100000",
        "2**2**2**2**2**2",
        "'a'.replace('', 'b' * 90000000)",
    ];
    all.extend(one.map(|expression| format!("{{{{ {expression} }}}}")));
    all.push("{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}".into());
    all.push("{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}".into());
    all.push("{% filter upper %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endfilter %}".into());
    all
}

/// What rendering takes: time.
fn time_bombs() -> Vec<String> {
    let mut all: Vec<String> = ["[1] * 10**15", "range(99999)|list|string"]
        .map(|expression| format!("{{% set x = {expression} %}}").repeat(50))
        .into();
    all.push(grown("[1]", 60, "[ns.s, ns.s]", "{{ ns.s }}"));
    all.push(grown("[1]", 60, "[ns.s, ns.s]", "{{ ns.s == ns.s }}"));
    all.push(grown("[1]", 60, "[ns.s, ns.s]", "{{ ns.s in [[ns.s]] }}"));
    all.push(grown("[]", 99_999, "ns.s + [1]", "{{ ns.s|length }}"));
    let dear = ["s.count('a')", "l|tojson", "l|sort", "10**9 in l", "l|reverse|list", "s|upper", "s * 100"];
    all.extend(dear.map(often));
    all.push("{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}".into());
    all
}

fn all_end(templates: Vec<String>) -> Vec<String> {
    let sentences = templates.iter().filter_map(|source| outcome(source).err()).collect();
    assert_honest_works();
    assert_memory_was_bounded();
    sentences
}

fn count(sentences: &[String], words: &str) -> usize {
    sentences.iter().filter(|sentence| sentence.contains(words)).count()
}

#[test]
fn no_template_takes_the_stack() {
    let compiled = all_end(compile_bombs());
    assert!(count(&compiled, "cannot be used: it nests too deeply, or takes more than 192 MiB") >= 5, "{compiled:#?}");
    assert!(count(&compiled, "has more than 256 KiB") >= 2, "{compiled:#?}");
    let rendered = all_end(depth_bombs());
    assert!(count(&rendered, "failed on this conversation: it nests too deeply") >= 5, "{rendered:#?}");
}

#[test]
fn no_template_takes_the_memory() {
    let sentences = all_end(memory_bombs());
    assert!(count(&sentences, "more than 192 MiB of memory") >= 10, "{sentences:#?}");
    assert!(count(&sentences, "writes more than") >= 2, "{sentences:#?}");
}

#[test]
fn no_template_takes_the_time() {
    let sentences = all_end(time_bombs());
    assert!(count(&sentences, "takes more than 2 seconds") >= 5, "{sentences:#?}");
}
