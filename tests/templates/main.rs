//! Chat templates of strangers: whatever one holds, it is refused in a sentence, in time, and the next one works.
//!
//! The built command renders, as it does for itself; `ulimit` and the kernel are real.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

#[path = "../common/mod.rs"]
mod common;
mod generated;
mod hostile;
mod jinja2;
mod served;

use std::sync::Once;
use std::time::{Duration, Instant};

use moebius::cli::RENDER_TEMPLATES;
use moebius::text::chat_template::{self, ChatTemplate, RenderOptions};
use serde_json::{Value, json};

/// What ends within 2 s of processor time may take this long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Resident memory of a process that renders, at most.
const MAX_RSS_BYTES: i64 = 256 << 20;

/// The tokens that templates may name.
const SPECIAL_TOKENS: [(&str, &str); 3] = [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<pad>")];

/// A template rendered as the command renders it: compiled and rendered in a process of its own.
fn compile(source: &str) -> moebius::Result<ChatTemplate> {
    static SAID: Once = Once::new();
    let program = || std::env::var_os("CARGO_BIN_EXE_moebius").unwrap_or(env!("CARGO_BIN_EXE_moebius").into());
    SAID.call_once(|| chat_template::render_in(vec![program(), RENDER_TEMPLATES.into()]));
    ChatTemplate::compile(
        source,
        SPECIAL_TOKENS.map(|(name, text)| (name.to_string(), json!(text))).into_iter().collect(),
    )
}

/// Templates of models by name, which llama.cpp has for its tests; `None` where they are missing.
fn collection() -> Option<Vec<(String, String)>> {
    let folder = std::fs::read_dir(common::root().join("target/vocabularies/templates")).ok()?;
    let mut paths: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jinja"));
    paths.sort();
    let name = |path: &std::path::PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    Some(paths.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect())
}

fn messages() -> Vec<Value> {
    vec![
        json!({"role": "user", "content": "Hi, é!"}),
        json!({"role": "assistant", "content": null, "n": [1, 2.5, {"a": true}]}),
    ]
}

fn render(template: &ChatTemplate) -> moebius::Result<String> {
    template.render(&messages(), &RenderOptions { add_generation_prompt: true, ..RenderOptions::default() })
}

/// The text or the sentence that comes of a template, which must come in time.
fn outcome(source: &str) -> Result<String, String> {
    let start = Instant::now();
    let text = compile(source).and_then(|template| render(&template));
    let took = start.elapsed();
    let beginning: String = source.chars().take(300).collect();
    assert!(took < PATIENCE, "{took:?} for {beginning}");
    text.map_err(|e| {
        let sentence = e.to_string();
        assert!(
            !sentence.is_empty() && sentence.chars().count() < 400 && !sentence.contains('\n'),
            "{sentence:?} of {beginning}"
        );
        sentence
    })
}

/// An honest template still works.
fn assert_honest_works() {
    let honest = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    assert_eq!(outcome(honest), Ok("<s>[user]Hi, é![assistant]None".into()));
}

/// The most memory that any ended child of this process, or a child of it, had.
#[allow(unsafe_code)]
fn children_peak_bytes() -> i64 {
    // SAFETY: all zeros are a usage, which is then written.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage
    };
    usage.ru_maxrss << 10
}

fn assert_memory_was_bounded() {
    let peak = children_peak_bytes();
    assert!(peak < MAX_RSS_BYTES, "{} MiB", peak >> 20);
}

/// Processes whose parent is `pid`.
fn children_of(pid: u32) -> Vec<u32> {
    let stat = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
    let parent = |stat: String| stat.rsplit(") ").next()?.split(' ').nth(1)?.parse::<u32>().ok();
    let all = std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    all.filter(|child| stat(child).and_then(parent) == Some(pid)).collect()
}

#[test]
fn a_template_from_elsewhere_renders_as_in_this_process() {
    // What a number, a map's order or a character is must not change between two processes.
    let source = "{{ messages|tojson }}{{ tools|tojson }}{% for k, v in kwargs.items() %}{{ k }}={{ v }} {% endfor \
                  %}{{ bos_token }}{{ 'x' in messages[0] }}";
    let kwargs = json!({"kwargs": {"z": 1, "a": 18446744073709551615u64, "é": -1.5, "": null, "big": 1e15,
        "\u{0}\u{1f600}": [[], {}]}, "bos_token": "<other>"});
    let options = RenderOptions {
        tools: Some(json!([{"b": 1, "a": {"x": false}}])),
        kwargs: kwargs.as_object().unwrap().clone(),
        ..Default::default()
    };
    let text = compile(source).unwrap().render(&messages(), &options).unwrap();
    assert_eq!(
        text,
        "[{\"role\": \"user\", \"content\": \"Hi, é!\"}, {\"role\": \"assistant\", \"content\": null, \"n\": [1, 2.5, \
         {\"a\": true}]}][{\"b\": 1, \"a\": {\"x\": false}}]z=1 a=18446744073709551615 é=-1.5 =None \
         big=1000000000000000.0 \u{0}\u{1f600}=[[], {}] <other>False"
    );
    let refuses = compile("{{ raise_exception('only\\nusers, ' ~ 'please '*1000) }}").unwrap();
    let words = render(&refuses).unwrap_err().to_string();
    assert!(words.starts_with("only users, please please") && words.chars().count() == 201, "{words}");
}

#[test]
fn long_conversations_are_rendered() {
    let template = compile("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}").unwrap();
    let long = |count: usize, bytes: usize| vec![json!({"role": "user", "content": "x".repeat(bytes)}); count];
    for (count, bytes) in [(1, 16 << 20), (10_000, 1_500), (100_000, 1)] {
        let text = template.render(&long(count, bytes), &RenderOptions::default()).unwrap();
        assert_eq!(text.len(), count * (bytes + 8));
    }
    let doubled = compile("{% for m in messages * 9 %}{{ m.content }}{% endfor %}").unwrap();
    let error = doubled.render(&long(1, 8 << 20), &RenderOptions::default()).unwrap_err().to_string();
    assert!(error.contains("writes more than 33554432 bytes"), "{error}");
    let error = template.render(&long(1, 33 << 20), &RenderOptions::default()).unwrap_err().to_string();
    assert!(error.contains("more than 32 MiB"), "{error}");
    assert_memory_was_bounded();
}

#[test]
fn many_ask_at_once() {
    let template = compile(
        "{% if messages[0].content == 'slow' %}{% for i in range(99999) %}{{ range(99999)|list|string|length }}{% \
         endfor %}{% endif %}x",
    )
    .unwrap();
    let ask = |text: &str| template.render(&[json!({"role": "user", "content": text})], &RenderOptions::default());
    let start = Instant::now();
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| ask("slow").unwrap_err().to_string());
        for _ in 0..16 {
            scope.spawn(|| (0..20).for_each(|_| assert_eq!(ask("quick").unwrap(), "x")));
        }
        assert!(slow.join().unwrap().contains("more than 2 seconds"));
    });
    assert!(start.elapsed() < PATIENCE);
}
