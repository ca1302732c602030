//! Markdown and the highlighter, in the browser that will run them.

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::fake::{Reply, Server};
use crate::open;

/// A function body with `Prose`, after all libraries that drawing may need are there.
fn drawing(body: &str) -> String {
    format!(
        "return Promise.all([import('/web/markdown.js'), import('/web/highlight.js').then(({{ load }}) => load()), \
         import('/web/math.js').then(({{ load }}) => load())]).then(([{{ Prose }}]) => {{ {body}\n}})"
    )
}

/// Each text as the markup of the nodes it becomes, with what every link carries left out.
fn render(browser: &Browser, texts: &[&str]) -> Vec<String> {
    let code = "return import('/web/markdown.js').then(({ Prose }) => arguments[0].map((text) => {
        const root = document.createElement('div');
        new Prose(root).update(text);
        for (const math of root.querySelectorAll('.math')) {
            math.removeAttribute('role');
            math.removeAttribute('aria-label');
        }
        return root.innerHTML.replaceAll(' target=\"_blank\" rel=\"noopener noreferrer nofollow\"', '');
    }))";
    serde_json::from_value(browser.js_with(code, &json!(texts))).unwrap()
}

#[test]
fn markdown_becomes_what_it_means() {
    let server = Server::real();
    let browser = open!(server);
    let cases = [
        (
            "a *b* **c** ***d*** ~~e~~ `f`",
            "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <s>e</s> <code>f</code></p>",
        ),
        ("snake_case_name and 2 * 3 * 4", "<p>snake_case_name and 2 * 3 * 4</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("`` a`b `` and `*x*`", "<p><code>a`b</code> and <code>*x*</code></p>"),
        ("\\*not\\* &lt;b&gt; &amp; &#65; a\\\nb", "<p>*not* &lt;b&gt; &amp; A a<br>b</p>"),
        ("# One\n### Three ###\ntext", "<h3>One</h3><h5>Three</h5><p>text</p>"),
        ("a\n---\nb", "<p>a</p><hr><p>b</p>"),
        (
            "- a\n- b\n  - c\n\n- d",
            "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
        ),
        ("3. a\n4. b\n   ```\n   x\n   ```", "<ol start=\"3\"><li><p>a</p></li><li><p>b</p><figure class=\"code\">"),
        (
            "1. a\n  - b\n2. c",
            "<ol><li><p>a</p></li></ol><ul><li><p>b</p></li></ul><ol start=\"2\"><li><p>c</p></li></ol>",
        ),
        (
            "- [x] a\n- [ ] b",
            "<ul><li class=\"task\"><input type=\"checkbox\" disabled=\"\" aria-label=\"done\" checked=\"\"><p>a</p>\
             </li>",
        ),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        (
            "[a *b*](https://x.org/y \"t\") <https://z.org>",
            "<p><a href=\"https://x.org/y\">a <em>b</em></a> <a href=\"https://z.org/\">https://z.org</a></p>",
        ),
        (
            "see https://x.org/a_(b)_c. (http://y.org/)",
            "<p>see <a href=\"https://x.org/a_(b)_c\">https://x.org/a_(b)_c</a>. (<a href=\"http://y.org/\">\
             http://y.org/</a>)</p>",
        ),
        ("![alt](https://x.org/i.png)", "<p><a href=\"https://x.org/i.png\" class=\"image\">alt</a></p>"),
        (
            "[a [b](https://x.org) c](https://y.org) ![d [e](https://x.org)](https://y.org)",
            "<p>[a <a href=\"https://x.org/\">b</a> c](<a href=\"https://y.org/\">https://y.org</a>) <a \
             href=\"https://y.org/\" class=\"image\">d [e](https://x.org)</a></p>",
        ),
        ("` a ` and `  ` and ` a`", "<p><code>a</code> and <code>  </code> and <code> a</code></p>"),
        ("$x_1 + y_1$ costs $5 and $6", "<p><span class=\"math\">x_1 + y_1</span> costs $5 and $6</p>"),
        (
            "\\(a_b\\) and\n\n$$\n\\sum_i x_i\n$$\n\n\\[ y \\]",
            "<p><span class=\"math\">a_b</span> and</p><div class=\"math\">\\sum_i x_i</div><div class=\"math\">\
             y</div>",
        ),
        (
            "| a | b |\n|:-:|--:|\n| `x\\|y` | 1\\|2 |\n\nz",
            "<div class=\"table\" tabindex=\"0\"><table><thead><tr><th class=\"center\" scope=\"col\">a</th><th \
             class=\"right\" scope=\"col\">b</th></tr></thead>\
             <tbody><tr><td class=\"center\"><code>x|y</code></td><td class=\"right\">1|2</td></tr></tbody></table>\
             </div><p>z</p>",
        ),
        ("a<br>b <b>c</b>", "<p>a<br>b &lt;b&gt;c&lt;/b&gt;</p>"),
        ("", ""),
    ];
    let texts: Vec<_> = cases.iter().map(|(text, _)| *text).collect();
    for ((text, want), got) in cases.iter().zip(render(&browser, &texts)) {
        assert!(
            got.starts_with(want) && (want.ends_with("code\">") || want.contains("checked") || got == *want),
            "{text:?} became\n{got}, not\n{want}"
        );
    }
    browser.finish(&[]);
}

#[test]
fn hostile_text_stays_text() {
    let server = Server::real();
    let browser = open!(server);
    let texts = [
        "<script>window.hacked = 1</script>",
        "<img src=x onerror=\"window.hacked = 1\">",
        "[a](javascript:window.hacked=1) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) \
         [e](file:///etc/passwd)",
        "[f](java\nscript:x) [g](\u{1}javascript:x) [h](&#106;avascript:x) <javascript:x> [i](//evil.org) \
         ![j](javascript:x)",
        "[k](https://x.org/\"onclick=\"x) `<script>` **<i>**",
        "```html\n<script>window.hacked = 1</script>",
        "| <svg onload=x> |\n|---|\n| <iframe src=javascript:x> |",
    ];
    for (text, markup) in texts.iter().zip(render(&browser, &texts)) {
        for word in [
            "<script",
            "<img",
            "<svg",
            "<iframe",
            "<i>",
            "href=\"javascript",
            "href=\"data",
            "href=\"vbscript",
            "href=\"file",
            "href=\"//",
        ] {
            assert!(!markup.to_lowercase().contains(word), "{text} became {markup}");
        }
    }
    // The whole page agrees, and every link that is made is a safe one.
    let all = texts.join("\n\n");
    let server = Server::saying(move |_| Reply::text(&all));
    browser.go(&server.url());
    browser.type_into("#composer-text", "hello\u{e007}");
    browser.wait("document.querySelector('.assistant .foot')?.hasChildNodes()");
    let links = browser.js("return [...document.querySelectorAll('.prose a')].map((a) => [a.protocol, a.rel].join())");
    assert!(links.as_array().unwrap().iter().all(|link| link == "https:,noopener noreferrer nofollow"), "{links}");
    assert_eq!(browser.js("return window.hacked ?? null"), Value::Null);
    assert!(browser.console().is_empty());
    // And were there a hole, the policy would stop it and say so: this is what the other tests listen for.
    let blocked = browser.js("try { document.body.innerHTML = '<b>x</b>'; return false } catch (error) { return \
                              error.name === 'TypeError' }");
    assert_eq!(blocked, true);
    browser
        .js("const s = document.createElement('style'); s.textContent = 'body{display:none}'; document.head.append(s)");
    assert!(browser.console().iter().any(|line| line.contains("Content Security Policy")));
}

/// Nothing that a model may write takes the page long, and none of it nests without end.
#[test]
fn large_and_adverse_text_is_drawn_quickly() {
    let server = Server::real();
    let browser = open!(server);
    let rows: String = (0..2000).map(|i| format!("| {i} | `a` | **b** | c |\n")).collect();
    let cases = [
        format!("| a | b | c | d |\n|---|---|---|---|\n{rows}"),
        format!("|{}\n|{}\n{}", "a|".repeat(3000), "-|".repeat(3000), "|x\n".repeat(3000)),
        "[".repeat(50_000),
        "[](".repeat(30_000),
        "![](x".repeat(20_000),
        "*a **b ".repeat(20_000),
        "**a*".repeat(20_000),
        "_a*b_c*".repeat(15_000),
        "`".repeat(50_000),
        (1..400).map(|n| format!("{} ", "`".repeat(n))).collect(),
        "$a ".repeat(40_000),
        "\\(".repeat(50_000),
        "<".repeat(50_000),
        "&#".repeat(50_000),
        "http://".repeat(15_000),
        format!("http://x.org/{}", ")".repeat(5_000)).repeat(10),
        "> ".repeat(50_000),
        "- ".repeat(50_000),
        (0..500).map(|n| format!("{}- a\n", "  ".repeat(n))).collect(),
        format!("# a{}b", " ".repeat(100_000)),
        format!("```{}`", " ".repeat(100_000)),
        format!("a|b\n-{}x", " ".repeat(100_000)),
        "a\n".repeat(50_000),
        "a  \n".repeat(20_000),
        format!("```js\n{}", "let a = 'b'; // c\n".repeat(5_000)),
        format!("```yaml\n{}", "-".repeat(90_000)),
        format!("```rust\n{}", "r#\"".repeat(30_000)),
        format!("```css\n{}", "a".repeat(90_000)),
        "$$\n".repeat(30_000),
        format!("{}{}", "![".repeat(7_000), "](https://b)".repeat(7_000)),
        format!("{}{}", "![*a ".repeat(5_000), "*](https://b)".repeat(5_000)),
    ];
    let code = drawing(
        "return arguments[0].map((text) => {
        const root = document.createElement('div');
        const start = performance.now();
        new Prose(root).update(text, true);
        const depth = (node) => Math.max(0, ...[...new Set([...node.children].slice(0, 50))].map(depth)) + 1;
        return [performance.now() - start, depth(root)];
    })",
    );
    for (result, text) in browser.js_with(&code, &json!(cases)).as_array().unwrap().iter().zip(&cases) {
        let (ms, depth) = (result[0].as_f64().unwrap(), result[1].as_u64().unwrap());
        let start: String = text.chars().take(30).collect();
        assert!(ms < 3000.0 && depth < 120, "{start:?} took {ms:.0} ms and is {depth} deep");
    }
    browser.finish(&[]);
}

/// Eight times the text takes about eight times as long: with the square of its length it would be 64 times. Each of
/// these was so once.
#[test]
fn time_grows_with_the_text_and_not_with_its_square() {
    let server = Server::real();
    let browser = open!(server);
    // What a text begins with, what is repeated, what is repeated after that, and its end.
    let cases = [
        ("", "*a ", " a*", ""),
        ("", "*a _b ", "b_ a* ", ""),
        ("\\[\n", "x\n", "", ""),
        ("$$\n", "x\n", "", ""),
        ("", "\\[\nx\n\n", "", ""),
        ("", "$$", "", "x"),
        ("", "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", "[a](https://b)", ""),
        ("", "[a ", "](https://b)", ""),
        ("", "![", "](https://b)", ""),
        ("", "$a", "", ""),
        ("", "\\(a", "", "\\)"),
        ("$$", "\\frac{a}", "", "$$"),
        ("", "![[a](https://b) ", "](https://b)", ""),
        ("[](", " ", "", "x"),
        ("[](a", " ", "", "x"),
        ("x` ", "a", "", "`"),
        ("", "~", "", "`"),
        ("", "http://%/", "", ""),
        ("", "http:///", "", ""),
        ("", "https://b)](", "", ""),
        ("http://x", ".", "", "y"),
        ("# ", "#", " #", "x"),
        ("a|b\n", "- | ", "", "x"),
        ("```rust\n", "r#\"", "", ""),
        ("```css\na", " ", "", "x"),
        ("```html\n", "a=\"", "", ""),
    ];
    let code = drawing(
        "const [begin, piece, after, end, live] = arguments[0];
            const times = 12_500 / (piece.length + after.length);
            const drawing = (size) => {
                const text = begin + piece.repeat(times * size) + after.repeat(after && times * size) + end;
                const prose = new Prose(document.createElement('div'));
                const start = performance.now();
                prose.update(text, live);
                return performance.now() - start;
            };
            const fastest = (size) => Math.min(...[1, 2, 3, 4].map(() => drawing(size)));
            return [Math.max(20, fastest(1)), fastest(8)]; // below that other work on the machine counts",
    );
    for (begin, piece, after, end) in cases {
        for live in [false, true] {
            let times = browser.js_with(&code, &json!([begin, piece, after, end, live]));
            let (small, large) = (times[0].as_f64().unwrap(), times[1].as_f64().unwrap());
            assert!(
                large < 24.0 * small,
                "{begin:?} {piece:?} {after:?} {end:?}: {small:.0} ms, and eight times as much {large:.0} ms"
            );
        }
    }
    browser.finish(&[]);
}

/// A block that grows is drawn again and again, but never takes more than its share of the time.
#[test]
fn a_long_block_that_grows_leaves_the_page_its_time() {
    let items: String = (0..8_000).map(|i| format!("- item *{i}*\n")).collect();
    let server = Server::saying(move |_| Reply::text(&items));
    let browser = open!(server);
    browser.js("return import('/web/markdown.js').then(({ Prose }) => {
            const update = Prose.prototype.update;
            Object.assign(window, { spent: 0, draws: 0, first: 0, last: 0 });
            Prose.prototype.update = function (...all) {
                const start = performance.now();
                window.first ||= start;
                update.apply(this, all);
                window.last = performance.now();
                window.spent += window.last - start;
                window.draws += 1;
            };
        })");
    browser.type_into("#composer-text", "go\u{e007}");
    browser.wait("document.querySelector('.assistant .foot')?.hasChildNodes()");
    let numbers = browser.js("return [spent, last - first, draws, document.querySelectorAll('.prose li').length]");
    let [spent, all, draws, shown] = std::array::from_fn(|i| numbers[i].as_f64().unwrap());
    assert_eq!(shown, 8_000.0);
    assert!(draws > 2.0 && spent < 0.5 * all, "{draws} drawings took {spent:.0} of {all:.0} ms");
    browser.finish(&[]);
}

/// However a text is cut into pieces, in the end it looks as if it had come at once; and what is final is never touched
/// again.
#[test]
fn streaming_ends_where_the_whole_text_begins() {
    let server = Server::real();
    let browser = open!(server);
    let text = "# Title\n\nSome **bold *nested* text** with `code` and [a link](https://x.org).\n\n1. one\n\n2. \
                two\n   - \
         deep\n\n     more\n10. ten\n\n```rust\nfn main() {\n    println!(\"```\");\n}\n```\n\n| a | b \
         |\n|---|--:|\n| 1 | *2* |\nc | d\n\n> quote\n> - in it\n\n$$\nx\n$$\n\n- [ ] task\n* other\n\n***\nlast \
         *line*\n";
    let code = "return import('/web/markdown.js').then(({ Prose }) => {
        const [text] = arguments;
        const whole = document.createElement('div');
        new Prose(whole).update(text);
        const problems = [];
        for (let seed = 1; seed <= 25; seed++) {
            const root = document.createElement('div');
            const prose = new Prose(root);
            let at = 0, random = seed, first = null;
            while (at < text.length) {
                random = (random * 48271) % 2147483647;
                at = Math.min(text.length, at + 1 + (random % (seed === 1 ? 1 : 9)));
                prose.update(text.slice(0, at), true);
                first ??= root.children.length > 2 ? root.firstChild : null;
                if (first && root.firstChild !== first) problems.push(`seed ${seed}: the first block was replaced at \
                ${at}`);
            }
            prose.update(text, false);
            if (!root.isEqualNode(whole)) problems.push(`seed ${seed}: ${root.innerHTML}\\nnot ${whole.innerHTML}`);
        }
        return problems;
    })";
    let problems = browser.js_with(code, &json!(text));
    assert_eq!(problems, json!([]));
    browser.finish(&[]);
}

#[test]
fn unfinished_text_looks_like_what_it_will_be() {
    let server = Server::real();
    let browser = open!(server);
    let code = "return import('/web/markdown.js').then(({ Prose }) => arguments[0].map((text) => {
        const root = document.createElement('div');
        new Prose(root).update(text, true);
        return root.innerHTML;
    }))";
    let cases = [
        ("a **bo", "<p>a <strong>bo</strong></p>"),
        ("a **bold*", "<p>a <strong>bold</strong></p>"),
        ("a `co", "<p>a <code>co</code></p>"),
        ("a [link](https://x.o", "<p>a link</p>"),
        ("```py\nx = 1\n``", "<figure class=\"code\">"),
        ("| a | b |\n|--", "<div class=\"table\" tabindex=\"0\"><table><thead>"),
    ];
    let texts: Vec<_> = cases.iter().map(|(text, _)| *text).collect();
    let got: Vec<String> = serde_json::from_value(browser.js_with(code, &json!(texts))).unwrap();
    for ((text, want), got) in cases.iter().zip(got) {
        assert!(got.starts_with(want) && !got.contains("``"), "{text:?} became {got}");
    }
    browser.finish(&[]);
}

#[test]
fn a_selection_survives_the_words_that_follow() {
    let server = Server::saying(|_| Reply::text(&"some more words ".repeat(100)).every(10));
    let browser = open!(server);
    browser.type_into("#composer-text", "go\u{e007}");
    browser.wait("document.querySelector('.assistant .prose p')?.textContent.length > 40");
    browser.js("const text = document.querySelector('.assistant .prose p').firstChild; \
                getSelection().setBaseAndExtent(text, 0, text, 15)");
    let length = browser.text(".assistant .prose").len();
    browser.wait(&format!("document.querySelector('.assistant .prose').textContent.length > {}", length + 60));
    assert_eq!(browser.js("return getSelection().toString()"), "some more words");
    browser.finish(&[]);
}

#[test]
fn code_is_highlighted_and_copied_as_it_is() {
    let server = Server::real();
    let browser = open!(server);
    let code = "return import('/web/highlight.js').then(async ({ highlight, load }) => {
        await load();
        return arguments[0].map(([code, language]) => {
            const root = highlight(document.createElement('code'), code, language);
            if (root.textContent !== code) return 'other text';
            return [...root.children].map((e) => e.className.slice(3) + ' ' + e.textContent).join('; ');
        });
    })";
    let cases = [
        (
            "fn f(x: &'a str) -> Vec<u8> { 'c'; 0xFFu8 } // end",
            "rs",
            "keyword fn; call f; number 'a; type str; type Vec; type u8; string 'c'; number 0xFFu8; comment // end",
        ),
        ("/* a\n b */ const x = `t ${y}`;", "ts", "comment /* a\n b */; keyword const; string `t ${y}`"),
        (
            "def f():\n  '''a\n  b'''\n  return 1.5e3 # c",
            "python",
            "keyword def; call f; string '''a\n  b'''; keyword return; number 1.5e3; comment # c",
        ),
        ("{\"a\": [true, \"b\"]}", "json", "attribute \"a\"; keyword true; string \"b\""),
        ("SELECT a FROM t -- c", "sql", "keyword SELECT; keyword FROM; comment -- c"),
        ("+a\n-b", "diff", "added +a; removed -b"),
        ("fn constructor", "nonsense", ""),
        ("x", "constructor", ""),
        ("x", "__proto__", ""),
    ];
    let asked: Vec<_> = cases.iter().map(|(code, language, _)| (code, language)).collect();
    let got: Vec<String> = serde_json::from_value(browser.js_with(code, &json!(asked))).unwrap();
    for ((code, language, want), got) in cases.iter().zip(got) {
        assert_eq!(got, *want, "{language}: {code}");
    }

    let server = Server::saying(|_| Reply::text("```rust\nlet a = 1;\n\nlet b = \"x\";\n```"));
    browser.go(&server.url());
    browser.type_into("#composer-text", "go\u{e007}");
    browser.js("Object.defineProperty(navigator, 'clipboard', { value: { writeText: async (text) => { window.copied \
                = text } } })");
    browser.click(".copy-code");
    browser.wait("window.copied !== undefined");
    assert_eq!(browser.js("return window.copied"), "let a = 1;\n\nlet b = \"x\";");
    browser.finish(&[]);
}

/// Formulas are typeset with their fonts, under the page's own policy; what is none stays as it was written.
#[test]
fn mathematics_is_typeset() {
    let text = "Sorting takes $O(n \\log n)$; \\(a_b\\) costs $5 and $6.\n\n$$\n\\frac{a}{b} \\pmb{x} \\fbox{y} \
                \\color{red} z\n$$\n\n\\[ \\sum_i x_i \\]\n\nNone: $\\undefined{$, $\\href{javascript:x}{y}$.";
    let server = Server::saying(move |_| Reply::text(text));
    let browser = open!(server);
    browser.type_into("#composer-text", "go\u{e007}");
    browser.wait("document.querySelectorAll('.prose .math .katex').length === 5");
    let shown = "return [...document.querySelectorAll('.prose .math')].map((m) => [m.tagName, m.ariaLabel, \
                 m.querySelector('a') === null && m.offsetWidth > 0])";
    assert_eq!(
        browser.js(shown),
        json!([
            ["SPAN", "O(n \\log n)", true],
            ["SPAN", "a_b", true],
            ["DIV", "\\frac{a}{b} \\pmb{x} \\fbox{y} \\color{red} z", true],
            ["DIV", "\\sum_i x_i", true],
            ["SPAN", "\\undefined{", true],
            ["SPAN", "\\href{javascript:x}{y}", true],
        ])
    );
    assert_eq!(browser.text(".prose .math:not(:has(.katex))"), "\\undefined{");
    browser.wait("document.fonts.check('16px KaTeX_Math')");
    assert!(browser.text(".prose p").ends_with("costs $5 and $6."));
    browser.finish(&[]);
}
