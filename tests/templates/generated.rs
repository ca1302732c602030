//! Templates made at random of all that the language has.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{assert_honest_works, assert_memory_was_bounded, children_of, outcome};

#[rustfmt::skip]
const FILTERS: &[&str] = &[
    "safe", "escape", "e", "lower", "upper", "title", "replace", "length", "count", "dictsort", "items", "reverse",
    "trim", "join", "split", "lines", "default", "d", "round", "abs", "int", "float", "attr", "first", "last", "min",
    "max", "sort", "list", "string", "bool", "batch", "slice", "sum", "indent", "select", "reject", "selectattr",
    "rejectattr", "map", "groupby", "unique", "chain", "zip", "pprint", "format", "tojson", "urlencode", "capitalize",
    "wordcount", "no_such",
];
#[rustfmt::skip]
const TESTS: &[&str] = &[
    "undefined", "defined", "none", "safe", "escaped", "boolean", "odd", "even", "divisibleby(3)", "number",
    "integer", "int", "float", "string", "sequence", "iterable", "mapping", "startingwith('a')", "endingwith('a')",
    "lower", "upper", "sameas(x)", "eq(x)", "lt(x)", "in(x)", "true", "false", "filter", "test", "no_such",
];
#[rustfmt::skip]
const METHODS: &[&str] = &[
    "upper", "lower", "islower", "isupper", "isspace", "isdigit", "isnumeric", "isalnum", "isalpha", "isascii",
    "strip", "lstrip", "rstrip", "replace", "title", "split", "splitlines", "capitalize", "count", "find", "rfind",
    "format", "startswith", "endswith", "join", "keys", "values", "items", "get", "no_such",
];
#[rustfmt::skip]
const FUNCTIONS: &[&str] = &[
    "range", "dict", "namespace", "debug", "raise_exception", "strftime_now", "m", "caller", "loop", "super",
    "self.b", "loop.cycle", "loop.changed",
];
#[rustfmt::skip]
const LEAVES: &[&str] = &[
    "x", "ns.s", "ns", "i", "m", "messages", "messages[0]", "messages[0].content", "loop", "loop.index",
    "loop.previtem", "self", "none", "true", "[]", "{}", "''", "0", "1", "2", "3", "-1", "7", "1.5", "1e308", "'a'",
    "'é<&>'", "'ab' * 99", "'%s'", "'{}'", "' a,b\n'", "[1, 2]", "{'a': 1}", "undefined_name", "bos_token", "100",
    "range(9)",
];
#[rustfmt::skip]
const LARGE: &[&str] = &[
    "10**10", "99999", "2**62", "-2**63", "10**18", "'%99999999999d'", "'%.99999999f'", "'{:>99999999}'",
    "'x' * 10**6", "'x' * 10**9", "[1] * 10**5", "[1] * 10**12", "range(99999)", "range(10**12)", "1",
    "9223372036854775807", "170141183460469231731687303715884105727",
];
#[rustfmt::skip]
const BINARY: &[&str] = &[
    "+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">", "<=", ">=", "and", "or", "in", "not in",
];

/// Choices made before, turned into a template: none left means the plainest.
struct Template<'a> {
    choices: std::slice::Iter<'a, u16>,
}

impl Template<'_> {
    fn below(&mut self, n: usize) -> usize {
        self.choices.next().map_or(0, |&choice| choice as usize % n)
    }

    fn one_of<'s>(&mut self, list: &[&'s str]) -> &'s str {
        list[self.below(list.len())]
    }

    fn is_over(&self) -> bool {
        self.choices.len() == 0
    }

    fn arguments(&mut self, depth: usize) -> String {
        let n = [0, 0, 0, 0, 1, 1, 2, 3][self.below(8)]; // what takes none takes no more
        (0..n)
            .map(|i| if i == 2 { format!("x={}", self.expression(depth)) } else { self.expression(depth) })
            .collect::<Vec<_>>()
            .join(", ")
    }

    fn expression(&mut self, depth: usize) -> String {
        if depth == 0 || self.is_over() {
            return self.one_of(LEAVES).into();
        }
        let depth = depth - 1;
        match self.below(24) {
            0..=4 => format!("({} {} {})", self.expression(depth), self.one_of(BINARY), self.expression(depth)),
            5..=9 => format!("({}|{}({}))", self.expression(depth), self.one_of(FILTERS), self.arguments(depth)),
            10..=12 => format!("{}.{}({})", self.expression(depth), self.one_of(METHODS), self.arguments(depth)),
            13 => format!("({} is {})", self.expression(depth), self.one_of(TESTS)),
            14 => format!("{}[{}]", self.expression(depth), self.expression(depth)),
            15 => format!(
                "{}[{}:{}:{}]",
                self.expression(depth),
                self.expression(depth),
                self.expression(depth),
                self.expression(depth)
            ),
            16 => format!("[{}]", self.arguments(depth).replace("x=", "")),
            17 => format!("{{{}: {}}}", self.expression(depth), self.expression(depth)),
            18 => format!("({} if {} else {})", self.expression(depth), self.expression(depth), self.expression(depth)),
            19 => format!("{}({})", self.one_of(FUNCTIONS), self.arguments(depth)),
            20 => self.one_of(LARGE).into(),
            21 => format!("(not {})", self.expression(depth)),
            22 => self.repeated(depth),
            _ => self.one_of(LEAVES).into(),
        }
    }

    /// The same around, or behind, itself.
    fn repeated(&mut self, depth: usize) -> String {
        let times = [3, 20, 149, 151, 3_000, 15_000][self.below(6)];
        let inner = self.expression(depth);
        let (before, after) = [
            ("(", ")"),
            ("[", "]"),
            ("not ", ""),
            ("-", ""),
            ("", "+1"),
            ("", "~x"),
            ("", ".b"),
            ("", "|string"),
            ("", "[0]"),
            ("", "()"),
            ("1 if 0 else ", ""),
            ("", " and x"),
        ][self.below(12)];
        format!("{}{inner}{}", before.repeat(times), after.repeat(times))
    }

    fn block(&mut self, depth: usize) -> String {
        (0..=self.below(3)).map(|_| self.statement(depth)).collect()
    }

    fn statement(&mut self, depth: usize) -> String {
        if depth == 0 || self.is_over() {
            return format!("{{{{ {} }}}}", self.expression(2));
        }
        let depth = depth - 1;
        let times = ["range(3)", "range(40)", "messages", "range(99999)", "x", "[[1], [2, [3]]]"][self.below(6)];
        match self.below(24) {
            0..=3 => format!("{{{{ {} }}}}", self.expression(3)),
            4 => format!("{{% set x = {} %}}", self.expression(3)),
            5..=7 => format!("{{% set ns.s = {} %}}", self.expression(3)),
            8..=10 => format!("{{% for i in {times} %}}{}{{% endfor %}}", self.block(depth)),
            11..=12 => format!("{{% for i in {times} %}}{{% set ns.s = {} %}}{{% endfor %}}", self.expression(2)),
            13 => format!(
                "{{% for i in {times} recursive %}}{}{{{{ loop({}) }}}}{{% endfor %}}",
                self.block(depth),
                self.expression(1)
            ),
            14 => format!(
                "{{% if {} %}}{}{{% elif {} %}}{}{{% else %}}x{{% endif %}}",
                self.expression(2),
                self.block(depth),
                self.expression(1),
                self.block(depth)
            ),
            15 => format!(
                "{{% macro m(a, b=1) %}}{}{{% endmacro %}}{{{{ m({}) }}}}",
                self.block(depth),
                self.arguments(1)
            ),
            16 => format!("{{% call(a) m({}) %}}{}{{% endcall %}}", self.arguments(1), self.block(depth)),
            17 => format!("{{% filter {} %}}{}{{% endfilter %}}", self.one_of(FILTERS), self.block(depth)),
            18 => format!("{{% set x %}}{}{{% endset %}}", self.block(depth)),
            19 => format!("{{% with x = {} %}}{}{{% endwith %}}", self.expression(2), self.block(depth)),
            20 => format!("{{% block b{} %}}{}{{% endblock %}}", self.below(9), self.block(depth)),
            21 => [
                "{% include 'chat_template' %}",
                "{% import 'chat_template' as m %}",
                "{% extends 'chat_template' %}",
                "{% from 'chat_template' import m %}",
                "{% break %}",
                "{% continue %}",
            ][self.below(6)]
            .into(),
            22 => format!("{{%- generation -%}}{}{{%+ endgeneration %}}", self.block(depth)),
            _ => {
                format!("{{% do {}({}) %}}{{# {} #}}\n", self.one_of(FUNCTIONS), self.arguments(1), self.expression(1))
            }
        }
    }
}

fn template(choices: &[u16]) -> String {
    let mut template = Template { choices: choices.iter() };
    let mut text = String::from(
        "{% set ns = namespace(s=['x']) %}{% set x = 'ab' %}{% set i = 3 %}{% macro m(a=1, b=1) %}{{ a }}{% endmacro \
         %}",
    );
    while !template.is_over() {
        text += &template.statement(4);
    }
    text
}

/// Tries this many templates; how many ended how.
fn try_templates(cases: u32) -> BTreeMap<String, usize> {
    let ends = RefCell::new(BTreeMap::new());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let tried = TestRunner::new(config).run(&prop::collection::vec(any::<u16>(), 1..120), |choices| {
        let end = match outcome(&template(&choices)) {
            Ok(_) => "a text".into(),
            Err(sentence) => sentence.splitn(2, ": ").last().unwrap_or_default().chars().take(60).collect::<String>(),
        };
        *ends.borrow_mut().entry(end).or_default() += 1;
        Ok(())
    });
    tried.unwrap();
    assert_honest_works();
    assert_memory_was_bounded();
    ends.into_inner()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn some_generated_templates_end() {
    try_templates(24);
}

/// `PROPTEST_CASES=10000 cargo test --test templates many_generated -- --ignored --nocapture`
#[test]
#[ignore = "many minutes"]
fn many_generated_templates_end() {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000);
    let before = (open_descriptors(), children_of(std::process::id()));
    let ends = try_templates(cases);
    assert_eq!((open_descriptors(), children_of(std::process::id())), before, "a descriptor or a process is left");
    let mut ends: Vec<_> = ends.into_iter().collect();
    ends.sort_by_key(|end| std::cmp::Reverse(end.1));
    println!("{:#?}", &ends[..ends.len().min(40)]);
}
