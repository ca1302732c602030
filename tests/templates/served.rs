//! The command with hostile templates: it refuses to start in a sentence, and a request that breaks a limit is an error
//! to that one alone.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::children_of;
use super::common::checkpoint::Checkpoint;
use super::common::fixture_dir;
use super::common::served::Served;

/// A model with this chat template.
fn model(template: &str) -> Checkpoint {
    let model = Checkpoint::copy_of(&fixture_dir("qwen3_moe"));
    std::fs::write(model.file("chat_template.jinja"), template).unwrap();
    model
}

/// Status and body of a question, and how long they took.
fn ask(url: &str, question: &str) -> (u16, Value, Duration) {
    let agent = ureq::Agent::new_with_config(ureq::Agent::config_builder().http_status_as_error(false).build());
    let start = Instant::now();
    let body = json!({"messages": [{"role": "user", "content": question}], "max_tokens": 2});
    let mut answer = agent.post(format!("{url}/v1/chat/completions")).send(body.to_string()).unwrap();
    (answer.status().as_u16(), serde_json::from_reader(answer.body_mut().as_reader()).unwrap(), start.elapsed())
}

/// Gone, or waiting for its parent to see that it is.
fn is_dead(pid: &u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(10), "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_hostile_template_is_refused_at_the_start() {
    for (template, why) in [
        (format!("{{{{ 1{} }}}}", "+1".repeat(100_000)), "nests too deeply"),
        (format!("{{{{ {}1 }}}}", "not ".repeat(60_000)), "nests too deeply"),
        ("é€x".repeat(5_000_000), "more than 256 KiB"),
        ("{% for %}".into(), "syntax error"),
    ] {
        let model = model(&template);
        for command in [&["serve", "MODEL", "--port", "0"][..], &["chat", "MODEL"], &["generate", "MODEL", "x"]] {
            let output = model.run(command);
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{stderr}");
            assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
            assert!(stderr.starts_with("error: the model's chat template cannot be used: "), "{stderr}");
            assert!(
                stderr.contains(why) && stderr.contains("put another template, as chat_template.jinja, into"),
                "{stderr}"
            );
        }
    }
    let model = model("x");
    model
        .remove("chat_template.jinja")
        .json("tokenizer_config.json", |config| config["chat_template"] = "{% elif 0 %}".repeat(50_000).into());
    let output = model.run(&["chat", "MODEL"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("more than 256 KiB"));
    model.bytes("tokenizer_config.json", |bytes| bytes.resize(9 << 20, b' '));
    let output = model.run(&["chat", "MODEL"]);
    assert!(String::from_utf8(output.stderr).unwrap().contains("tokenizer_config.json has more than 8 MiB"));
}

#[test]
fn a_hostile_request_is_an_error_to_itself() {
    let bombs = [
        ("stack", "{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}{{ ns.s }}", "nests too deeply"),
        ("memory", "{{ [1]|batch(10**10, 'x')|list }}", "more than 192 MiB"),
        ("time", "{% for i in range(99999) %}{{ ('ab' * 100000).count('a') }}{% endfor %}", "more than 2 seconds"),
        ("length", "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}", "writes more than"),
        ("panic", "{{ '%.1000000000f'|format(1.5) }}", "failed on this conversation"),
    ];
    let cases: String =
        bombs.iter().map(|(name, bomb, _)| format!("{{% if q == '{name}' %}}{bomb}{{% endif %}}")).collect();
    let model =
        model(&format!("{{% set ns = namespace(s=[]) %}}{{% set q = messages[-1].content %}}{cases}user: {{{{ q }}}}"));
    let mut server = Served::start(model.dir().to_str().unwrap(), &[]);
    let url = server.url.clone();
    let (_, alone, _) = ask(&url, "Hi");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let (status, answer, took) = ask(&url, "Hi");
                assert_eq!((status, &answer["choices"]), (200, &alone["choices"]));
                let start = Instant::now();
                assert_eq!(ureq::get(format!("{url}/health")).call().unwrap().status(), 200);
                assert!(start.elapsed() < Duration::from_secs(5), "/health took {:?}", start.elapsed());
                slowest = slowest.max(took);
                assert!(children_of(server.pid()).len() <= 2);
            }
            slowest
        });
        let answers = bombs.map(|(name, _, why)| (name, why, ask(&url, name)));
        done.store(true, Ordering::Relaxed);
        assert!(honest.join().unwrap() < super::PATIENCE);
        for (name, why, (status, answer, took)) in answers {
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(status == 400 && message.contains(why), "{name}: {status} {message}");
            assert!(took < super::PATIENCE, "{name}: {took:?}");
        }
    });
    assert!(server.is_running());
    let children = children_of(server.pid());
    assert!((1..=2).contains(&children.len()), "{children:?}");

    // Somebody kills what they do not know.
    children
        .iter()
        .for_each(|pid| assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()));
    wait_until("they are dead", || {
        children.iter().all(|pid| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z "))
    });
    assert_eq!(ask(&url, "Hi").0, 200);
    let children = children_of(server.pid());
    assert_eq!(children.len(), 1);
    drop(server); // by SIGKILL
    wait_until("they have followed", || children.iter().all(is_dead));
}
