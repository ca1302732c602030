//! How the page behaves on other screens, for keyboards, for readers who scroll.

use serde_json::json;

use crate::browser::{Browser, ENTER, ESCAPE, SHIFT, Screen, TAB, UP};
use crate::fake::{Reply, Server};
use crate::open;

/// Contrast ratio of text and background, as WCAG 2 defines it, of the first element that matches.
const CONTRAST: &str = r"
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const rgb = (...colors) => {
        canvas.reset();
        for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = (c) => {
        const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const node = document.querySelector(arguments[0]);
    const backgrounds = [];
    for (let n = node; n; n = n.parentElement) backgrounds.unshift(getComputedStyle(n).backgroundColor);
    const a = luminance(rgb(...backgrounds)), b = luminance(rgb(...backgrounds, getComputedStyle(node).color));
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);";

const RICH: &str = "Text with a [link](https://example.org), `code` and\n\n> a quote\n\n```rust\n// comment\nfn f() \
                    -> Option<u8> { Some(\"x\", 1) }\n```\n";

fn ask_and_wait(browser: &Browser, text: &str) {
    let before = browser.count(".assistant");
    browser.type_into("#composer-text", text);
    browser.click("#send");
    browser.wait(&format!(
        "document.querySelectorAll('.assistant').length === {} && document.querySelector('#send').ariaLabel === 'Send'",
        before + 1
    ));
}

fn assert_readable(browser: &Browser) {
    for css in [
        ".bubble",
        ".prose p",
        ".prose a",
        ".prose p code",
        "blockquote p",
        ".hl-comment",
        ".hl-keyword",
        ".hl-string",
        ".hl-number",
        ".hl-call",
        ".hl-type",
        "figcaption span",
        ".stats",
        "#meter",
        "#model",
        "#title",
        "#conversations h2",
        "#conversations a",
        ".new span",
    ] {
        browser.wait(&format!("document.querySelector({})", json!(css))); // the list of conversations comes last
        let ratio = browser.js_with(CONTRAST, &json!(css)).as_f64().unwrap();
        assert!(ratio >= 4.5, "{css} has contrast {ratio:.2}");
    }
}

#[test]
fn text_can_be_read_in_light_and_dark() {
    let server = Server::saying(|_| Reply::text(RICH));
    let browser = open!(server);
    ask_and_wait(&browser, "hello");
    let background = "getComputedStyle(document.body).backgroundColor";
    let light = browser.js(&format!("return {background}"));
    let becomes_light = format!("{background} === {light}");
    let becomes_dark = format!("{background} !== {light}");
    assert_readable(&browser);
    // The system's wish, then the reader's own.
    browser.devtools(
        "Emulation.setEmulatedMedia",
        json!({"features": [{"name": "prefers-color-scheme", "value": "dark"}]}),
    );
    browser.wait(&becomes_dark);
    assert_readable(&browser);
    browser.click("#open-settings");
    browser.click("label[for=theme-light]");
    browser.wait(&becomes_light);
    browser.devtools("Emulation.setEmulatedMedia", json!({"features": []}));
    browser.wait(&becomes_light);
    browser.click("label[for=theme-dark]");
    browser.wait(&becomes_dark);
    browser.reload();
    browser.wait(&becomes_dark);
    browser.finish(&[]);
}

#[test]
fn a_phone_gets_a_drawer_and_nothing_sticks_out() {
    let wide = format!(
        "{RICH}\n| a | b |\n|---|---|\n| {} | {} |\n\n{}",
        "wide ".repeat(60),
        "x".repeat(300),
        "y".repeat(500)
    );
    let server = Server::saying(move |_| Reply::text(&wide));
    let browser = open!(server, Screen::Phone);
    let fits = "document.documentElement.scrollWidth <= innerWidth && document.querySelector('#scroller').scrollWidth \
                <= innerWidth";
    browser.wait(fits);
    ask_and_wait(&browser, "hello");
    browser.wait(fits);
    let inside = "(r => r.left >= 0 && r.right <= innerWidth)(document.querySelector('#send').getBoundingClientRect())";
    browser.wait(inside);
    assert_eq!(browser.js("return document.querySelector('#sidebar').inert"), true);
    browser.click("#open-sidebar");
    browser.wait(
        "(r => r.left === 0 && r.width < innerWidth)(document.querySelector('#sidebar').getBoundingClientRect())",
    );
    assert_eq!(browser.js("return document.querySelector('#main').inert"), true);
    browser.click("#new");
    browser.wait("document.querySelector('#sidebar').inert && document.querySelectorAll('.message').length === 0");
    browser.click("#open-settings");
    browser.wait("(r => r.width === innerWidth)(document.querySelector('dialog').getBoundingClientRect())");
    // Fingers are wider than pointers.
    let small = "return [...document.querySelectorAll('dialog button, dialog .icon-button')].filter(b => \
                 b.offsetHeight < 24).length";
    assert_eq!(browser.js(small), 0);
    browser.finish(&[]);
}

#[test]
fn everything_can_be_done_with_a_keyboard() {
    let server = Server::saying(|body| match body["messages"].as_array().unwrap().len() {
        1 => Reply::text(&"word ".repeat(2000)).every(10),
        _ => Reply::text("done"),
    });
    let browser = open!(server);
    browser.wait("document.activeElement.id === 'composer-text'");
    browser.keys("one");
    browser.keys(&format!("{SHIFT}{ENTER}"));
    browser.keys(&format!("two{ENTER}"));
    browser.wait("document.querySelector('.assistant .prose')?.textContent.length > 20");
    assert_eq!(browser.text(".bubble"), "one\ntwo");
    browser.keys(ESCAPE);
    browser.wait("document.querySelector('.note')?.textContent.includes('Stopped')");
    // Up in an empty field edits what was asked; Escape gives up.
    browser.keys(UP);
    browser.wait("document.activeElement.ariaLabel === 'Edit your message'");
    browser.keys(ESCAPE);
    browser.wait("document.activeElement.ariaLabel === 'Edit' && !document.querySelector('.edit')");
    browser.keys("/");
    browser.wait("document.activeElement.id === 'composer-text'");
    browser.keys(&format!("three{ENTER}"));
    browser.wait("document.querySelector('.message:last-child .prose')?.textContent === 'done'");
    // Every stop of the Tab key can be seen and says what it is.
    browser.js("document.activeElement.blur()");
    for _ in 0..16 {
        browser.keys(TAB);
        let stop = browser.js("const e = document.activeElement; const r = e.getBoundingClientRect(); return { name: \
                               e.ariaLabel || e.textContent.trim() || e.labels?.[0]?.textContent, seen: r.width > 0 \
                               && r.height > 0 && getComputedStyle(e).opacity > 0, html: e.outerHTML.slice(0, 200) }");
        assert!(stop["seen"] == true && stop["name"].as_str().is_some_and(|name| !name.is_empty()), "{stop}");
    }
    // What was answered is told to who cannot see it.
    assert_eq!(browser.text("#announcer"), "done");
    browser.finish(&[]);
}

#[test]
fn the_end_is_followed_until_the_reader_scrolls_up() {
    let text: String = (0..300).map(|i| format!("Line {i}\n\n")).collect();
    let server = Server::saying(move |_| Reply::text(&text).every(4));
    let browser = open!(server);
    browser.type_into("#composer-text", &format!("go{ENTER}"));
    let gap = "(s => s.scrollHeight - s.scrollTop - s.clientHeight)(document.querySelector('#scroller'))";
    browser.wait(&format!("document.querySelector('#scroller').scrollTop > 300 && {gap} < 40"));
    // Scrolled just before a drawing: the event that tells of it comes only with the next frame.
    browser.js("Object.defineProperty(document, 'hidden', { value: true }); const later = setTimeout; let once = \
                true; window.setTimeout = (work, ms) => later(() => { if (once) \
                document.querySelector('#scroller').scrollBy(0, -200); once = false; work(); }, ms)");
    browser.wait("!document.querySelector('#latest').hidden");
    let top = browser.js("return document.querySelector('#scroller').scrollTop");
    let height = browser.js("return document.querySelector('#scroller').scrollHeight").as_f64().unwrap();
    browser.wait(&format!("document.querySelector('#scroller').scrollHeight > {height} + 200"));
    assert_eq!(browser.js("return document.querySelector('#scroller').scrollTop"), top);
    browser.click("#latest");
    browser.wait(&format!("{gap} < 40"));
    let height = browser.js("return document.querySelector('#scroller').scrollHeight").as_f64().unwrap();
    browser.wait(&format!("document.querySelector('#scroller').scrollHeight > {height} + 100 && {gap} < 40"));
    browser.finish(&[]);
}

#[test]
fn a_conversation_is_shown_once_another_tab_has_written_it() {
    let server = Server::saying(|_| Reply::text("done"));
    let browser = open!(server);
    browser.js("window.other = open(location.origin + '/#soon')");
    browser
        .wait("window.other.document.querySelector('#empty')?.hidden === false && window.other.location.hash === ''");
    browser.js("const request = indexedDB.open('moebius', 1); request.onsuccess = () => { const transaction = \
                request.result.transaction(['conversations', 'messages'], 'readwrite'); const now = Date.now(); \
                transaction.objectStore('conversations').put({ id: 'soon', title: 'Soon', named: false, created: \
                now, updated: now, system: '', sampling: {}, leaf: 'm' }); transaction.objectStore('messages').put({ \
                id: 'm', conversation: 'soon', parent: null, role: 'user', content: 'written late', created: now }); \
                transaction.oncomplete = () => new BroadcastChannel('moebius').postMessage({ changed: 'soon' }); }");
    browser.wait(
        "window.other.document.querySelector('.user')?.textContent.includes('written late') && \
         window.other.location.hash === '#soon'",
    );
    browser.finish(&[]);
}

#[test]
fn two_tabs_show_the_same() {
    let server = Server::saying(|_| Reply::text(&"word ".repeat(200)).every(10));
    let browser = open!(server);
    browser.type_into("#composer-text", &format!("go{ENTER}"));
    browser.wait("document.querySelector('.assistant .prose')?.textContent.length > 20");
    // A frame is a second page of the same origin; ours may not be framed, so it is opened.
    browser.js("window.other = open(location.href)");
    browser.wait("window.other.document.querySelector('.assistant .prose')?.textContent.length > 100");
    browser.wait("document.querySelector('#send').ariaLabel === 'Send'");
    let whole = "document.querySelector('.assistant .prose').textContent.length";
    browser.wait(&format!("window.other.{whole} === {whole}"));
    assert_eq!(browser.js("return window.other.document.querySelector('.note').textContent"), "");
    browser.finish(&[]);
}
