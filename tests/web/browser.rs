//! A headless Chromium, driven over the WebDriver protocol (W3C), as much of it as the tests need.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long anything on the page may take, on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(60);

pub const ENTER: &str = "\u{e007}";
pub const TAB: &str = "\u{e004}";
pub const ESCAPE: &str = "\u{e00c}";
pub const SHIFT: &str = "\u{e008}";
pub const UP: &str = "\u{e013}";

/// What a browser is started as.
#[derive(Clone, Copy, PartialEq)]
pub enum Screen {
    Desk,
    Phone,
}

pub struct Browser {
    driver: Child,
    session: String, // address of the session
    agent: ureq::Agent,
    _profile: tempfile::TempDir,
}

/// A running chromedriver and its port; `None`: there is none on this machine.
fn start_driver() -> Option<(Child, u16)> {
    // It takes a port that is free for IPv4 and gives up when it is not for IPv6.
    for _ in 0..10 {
        let mut driver =
            Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
        let port = |line: String| line.strip_suffix('.')?.split("successfully on port ").nth(1)?.parse().ok();
        if let Some(port) = lines.find_map(port) {
            return Some((driver, port));
        }
        let _ = driver.wait();
    }
    panic!("chromedriver ends before it says its port")
}

impl Browser {
    /// Starts one at `address`; without a Chromium says so under the test's name and returns `None`.
    pub fn open(address: &str, screen: Screen) -> Option<Self> {
        let Some((driver, port)) = start_driver() else {
            let thread = std::thread::current();
            // Straight to stderr: the test harness shows no other output of a test that passes.
            let _ = writeln!(
                std::io::stderr(),
                "{}: skipped: no chromedriver; apt-get install chromium chromium-driver",
                thread.name().unwrap()
            );
            return None;
        };
        let profile = tempfile::tempdir().unwrap();
        let data = format!("--user-data-dir={}", profile.path().display());
        let mut options = json!({"args": [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,860", data,
            "--force-prefers-reduced-motion", // what slides in is hard to click
        ]});
        if screen == Screen::Phone {
            options["mobileEmulation"] =
                json!({"deviceMetrics": {"width": 390, "height": 800, "pixelRatio": 2, "touch": true}});
        }
        let agent =
            ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(2 * PATIENCE)).build().into();
        let mut browser = Self { driver, session: format!("http://127.0.0.1:{port}"), agent, _profile: profile };
        let asked = json!({"capabilities": {"alwaysMatch": {"goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"}}}});
        let session = browser.post("/session", asked);
        browser.session += &format!("/session/{}", session["sessionId"].as_str().unwrap());
        browser.go(address);
        Some(browser)
    }

    fn answer(
        &self,
        path: &str,
        response: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, String> {
        let mut response = response.unwrap_or_else(|e| panic!("{path}: {e}"));
        let body: Value = serde_json::from_reader(response.body_mut().as_reader()).unwrap();
        match body["value"]["error"].as_str() {
            Some(_) => Err(body["value"]["message"].to_string()),
            None => Ok(body["value"].clone()),
        }
    }

    fn try_post(&self, path: &str, body: &Value) -> Result<Value, String> {
        self.answer(path, self.agent.post(format!("{}{path}", self.session)).send(body.to_string()))
    }

    fn post(&self, path: &str, body: Value) -> Value {
        self.try_post(path, &body).unwrap_or_else(|e| panic!("{path} {body}: {e}"))
    }

    pub fn go(&self, address: &str) {
        self.post("/url", json!({ "url": address }));
    }

    pub fn reload(&self) {
        self.post("/refresh", json!({}));
    }

    /// The value of a JavaScript function body; a promise is awaited.
    pub fn js(&self, code: &str) -> Value {
        self.post("/execute/sync", json!({"script": code, "args": []}))
    }

    /// The value that `code` computes from an argument.
    pub fn js_with(&self, code: &str, argument: &Value) -> Value {
        self.post("/execute/sync", json!({"script": code, "args": [argument]}))
    }

    /// A DevTools command of Chromium.
    pub fn devtools(&self, command: &str, params: Value) {
        self.post("/goog/cdp/execute", json!({"cmd": command, "params": params}));
    }

    /// Waits until a JavaScript expression is true.
    pub fn wait(&self, expression: &str) {
        let start = Instant::now();
        // While a page loads there may be nothing to ask.
        while self.try_post("/execute/sync", &json!({"script": format!("return Boolean({expression})"), "args": []}))
            != Ok(json!(true))
        {
            if start.elapsed() > PATIENCE {
                let page = self.js("return document.body.innerText");
                panic!("in vain: {expression}\nthe page says: {page}\nits console: {:?}", self.console());
            }
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    fn find(&self, css: &str) -> String {
        self.wait(&format!("document.querySelector({})", json!(css)));
        let found = self.post("/element", json!({"using": "css selector", "value": css}));
        found.as_object().unwrap().values().next().unwrap().as_str().unwrap().to_string()
    }

    /// Clicks where a person would.
    pub fn click(&self, css: &str) {
        let start = Instant::now();
        // What is being drawn anew or moves cannot be clicked yet.
        while let Err(e) = self.try_post(&format!("/element/{}/click", self.find(css)), &json!({})) {
            assert!(start.elapsed() < PATIENCE, "cannot click {css}: {e}");
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    pub fn type_into(&self, css: &str, text: &str) {
        self.post(&format!("/element/{}/value", self.find(css)), json!({ "text": text }));
    }

    /// Keys to whatever has the focus.
    pub fn keys(&self, keys: &str) {
        let mut actions = Vec::new();
        for key in keys.chars() {
            actions.push(json!({"type": "keyDown", "value": key.to_string()}));
            if key.to_string() != SHIFT {
                actions.push(json!({"type": "keyUp", "value": key.to_string()}));
            }
        }
        if keys.contains(SHIFT) {
            actions.push(json!({"type": "keyUp", "value": SHIFT}));
        }
        self.post("/actions", json!({"actions": [{"type": "key", "id": "keyboard", "actions": actions}]}));
    }

    /// The text of the first element that matches.
    pub fn text(&self, css: &str) -> String {
        self.js_with("return document.querySelector(arguments[0])?.textContent ?? ''", &json!(css))
            .as_str()
            .unwrap()
            .to_string()
    }

    pub fn count(&self, css: &str) -> usize {
        self.js_with("return document.querySelectorAll(arguments[0]).length", &json!(css)).as_u64().unwrap() as usize
    }

    /// Warnings and errors since the last look, refusals by the content security policy among them.
    pub fn console(&self) -> Vec<String> {
        let entries = self.post("/se/log", json!({"type": "browser"}));
        let bad = entries
            .as_array()
            .unwrap()
            .iter()
            .filter(|entry| ["SEVERE", "WARNING"].contains(&entry["level"].as_str().unwrap()));
        bad.map(|entry| entry["message"].to_string()).collect()
    }

    /// Ends a test: nothing may have been complained about but what contains one of `expected`.
    pub fn finish(self, expected: &[&str]) {
        let all = self.console();
        let unexpected: Vec<_> = all.iter().filter(|line| !expected.iter().any(|e| line.contains(e))).collect();
        assert!(unexpected.is_empty(), "the console has {unexpected:#?}");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Without its session Chromium would outlive its driver.
        let _ = self.agent.delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}
