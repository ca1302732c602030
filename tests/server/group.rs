//! The built server in a control group of 1 GiB: nothing that anyone sends ends it, or stays in its memory.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::common::group::Group;
use crate::common::say_skipped;
use crate::common::served::Served;

/// What may stay of a large request.
const LEFT_BYTES: u64 = 100 << 20;

/// The status of the answer; `None`: there was none.
fn ask(address: SocketAddr, path: &str, body: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(120))).ok()?;
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    )
    .ok()?;
    stream.write_all(body).ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::io::copy(&mut stream, &mut std::io::sink()).ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}

fn honest(address: SocketAddr) -> Option<u16> {
    ask(address, "/v1/completions", json!({"prompt": "Once upon a time", "max_tokens": 4}).to_string().as_bytes())
}

fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_server_with_one_gib_outlives_those_who_ask_for_more() {
    let group = match Group::new(1 << 30) {
        Ok(group) => group,
        Err(why) => return say_skipped("a_server_with_one_gib_outlives_those_who_ask_for_more", &why),
    };
    let mut server = Served::start_in(Some(&group), "demo", &["--threads", "1"]);
    let address = server.address();
    let started = Instant::now();
    while honest(address) != Some(200) {
        assert!(started.elapsed() < Duration::from_secs(60), "the model is not there");
        std::thread::sleep(Duration::from_millis(100));
    }
    let sea = |times: usize| json!({"prompt": "the sea ".repeat(times), "max_tokens": 1}).to_string();
    let ids: Vec<usize> = (0..3900).map(|i| i * 7 % 400 + 30).collect();
    let capture =
        |form: &str| json!({"prompt": ids, "layers": "all", "logits": true, "encoding_format": form}).to_string();
    let objects = format!("{{\"messages\":[{}1]}}", r#"{"":0},"#.repeat((16 << 20) / 7 - 10));
    let chat = json!({"messages": [{"role": "user", "content": "the sea ".repeat(2_050_000)}]}).to_string();
    let many = json!({"messages": [{"role": "user", "content": "Hi"}], "n": 16, "max_tokens": 500, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 20});
    for (name, times, path, body, want) in [
        ("floats", 1, "/v1/capture", capture("float"), 200),
        ("floats of four", 4, "/v1/capture", capture("float"), 200),
        ("base64 of four", 4, "/v1/capture", capture("base64"), 200),
        ("a long text", 1, "/v1/completions", sea(2_050_000), 400),
        ("long texts", 8, "/v1/completions", sea(2_050_000), 400),
        ("a long message", 2, "/v1/chat/completions", chat, 400),
        (
            "a text as token strings",
            2,
            "/tokenize",
            sea(2_050_000).replace("\"max_tokens\":1", "\"return_token_strs\":true"),
            400,
        ),
        ("small objects", 2, "/v1/chat/completions", objects.clone(), 400),
        ("bodies of 16 MB", 64, "/v1/chat/completions", objects, 400),
        ("bodies of 240 KB", 100, "/v1/completions", sea(30_000), 400),
        ("logprobs", 1, "/v1/chat/completions", many.to_string(), 200),
        ("bodies of more than 16 MiB", 10, "/v1/completions", sea(2_300_000), 413),
    ] {
        let (before, started, done) = (resident_bytes(server.pid()), Instant::now(), AtomicBool::new(false));
        let (told, meanwhile) = std::thread::scope(|scope| {
            let beside = scope.spawn(|| {
                let mut told = Vec::new();
                while !done.load(Relaxed) {
                    told.push(honest(address));
                    std::thread::sleep(Duration::from_millis(50));
                }
                told
            });
            let asked: Vec<_> = (0..times).map(|_| scope.spawn(|| ask(address, path, body.as_bytes()))).collect();
            let told: Vec<_> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
            done.store(true, Relaxed);
            (told, beside.join().unwrap())
        });
        assert!(server.is_running(), "{name}: the server is gone");
        assert!(meanwhile.iter().all(|&status| status == Some(200)), "{name}: {meanwhile:?}");
        let right = told.iter().filter(|&&status| status == Some(want)).count();
        // Of many that come together, some may be told to come again.
        assert!(right > 0 && told.iter().all(|status| [Some(want), Some(429)].contains(status)), "{name}: {told:?}");
        std::thread::sleep(Duration::from_millis(500));
        let after = resident_bytes(server.pid());
        println!(
            "{name}: {right} of {times} got {want} within {:.1} s, {} honest answers meanwhile, {} -> {} MiB",
            started.elapsed().as_secs_f64(),
            meanwhile.len(),
            before >> 20,
            after >> 20
        );
        assert!(after < before + LEFT_BYTES, "{name}: {} MiB stay, {} were before", after >> 20, before >> 20);
        assert_eq!(honest(address), Some(200), "{name}");
    }
}
