//! What people do on the page: ask, stop, continue, edit, come back.

use serde_json::{Value, json};

use crate::browser::{Browser, ENTER, ESCAPE};
use crate::fake::{Reply, Server, asked};
use crate::open;

const FIELD: &str = "#composer-text";
const IDLE: &str = "document.querySelector('#send').ariaLabel === 'Send'";

fn ask(browser: &Browser, text: &str) {
    browser.type_into(FIELD, &format!("{text}{ENTER}"));
}

/// Asks, and waits for the whole answer.
fn ask_and_wait(browser: &Browser, text: &str) {
    let before = browser.count(".assistant");
    ask(browser, text);
    browser.wait(&format!("document.querySelectorAll('.assistant').length === {} && {IDLE}", before + 1));
}

fn last_answer(browser: &Browser) -> String {
    browser.text(".message:last-child .prose")
}

fn wait_for_text(browser: &Browser, css: &str, text: &str) {
    browser.wait(&format!("document.querySelector({})?.textContent.includes({})", json!(css), json!(text)));
}

/// A long answer whose words are numbered.
fn numbers() -> String {
    (0..400).map(|i| format!("n{i} ")).collect()
}

#[test]
fn the_demo_model_answers() {
    let server = Server::real();
    let browser = open!(server);
    wait_for_text(&browser, "#model", "demo");
    browser.click("#examples button:nth-child(2)");
    browser.wait(IDLE);
    wait_for_text(&browser, ".assistant .prose", "1, 2, 3, 4, 5");
    ask_and_wait(&browser, "What is the capital of France?");
    wait_for_text(&browser, ".message:last-child .prose", "Paris");
    wait_for_text(&browser, "#context", " of ");
    wait_for_text(&browser, ".message:last-child .stats", "tokens");
    assert_eq!(browser.js("return document.title"), "Count from 1 to 5. · Moebius");
    // The server says what it samples with, and the settings show it.
    browser.click("#open-settings");
    browser.wait("document.querySelector('#temperature').placeholder === '0'");
    browser.finish(&[]);
}

#[test]
fn an_answer_streams_stops_survives_a_reload_and_goes_on() {
    let server = Server::saying(|body| {
        let given = body["messages"].as_array().unwrap().last().unwrap();
        let text = numbers();
        match given["role"].as_str().unwrap() {
            "assistant" => Reply::text(&text[given["content"].as_str().unwrap().len()..]),
            _ => Reply::text(&text).every(15),
        }
    });
    let browser = open!(server);
    ask(&browser, "count");
    wait_for_text(&browser, ".assistant .prose", "n3 ");
    let early = last_answer(&browser).len();
    browser.wait(&format!("document.querySelector('.assistant .prose').textContent.length > {}", early + 20));

    browser.click("#send");
    wait_for_text(&browser, ".note", "Stopped.");
    let stopped = last_answer(&browser);
    assert!(numbers().starts_with(stopped.trim()) && stopped.len() < numbers().len() / 2, "{stopped}");
    browser.reload();
    wait_for_text(&browser, ".note", "Stopped.");
    assert_eq!(last_answer(&browser), stopped);

    // Another one, and the page is closed in its middle.
    browser.click(".assistant [aria-label=Regenerate]");
    wait_for_text(&browser, ".assistant .prose", "n9 ");
    let seen = last_answer(&browser).trim().len();
    browser.reload();
    wait_for_text(&browser, ".note", "The answer was interrupted.");
    let kept = last_answer(&browser).trim().to_string();
    assert!(numbers().starts_with(&kept) && kept.len() >= seen, "{} of {seen}", kept.len());
    assert_eq!(browser.text(".branches span"), "2/2");

    browser.click(".note button");
    browser.wait(IDLE);
    wait_for_text(&browser, ".assistant .prose", "n399");
    assert_eq!(last_answer(&browser).trim(), numbers().trim());
    let request = server.requests().pop().unwrap();
    assert_eq!((&request["continue_final_message"], &request["add_generation_prompt"]), (&json!(true), &json!(false)));
    browser.reload();
    wait_for_text(&browser, ".assistant .prose", "n399");
    assert_eq!(browser.text(".note"), "");
    browser.finish(&[]);
}

#[test]
fn a_server_that_cannot_continue_writes_again() {
    let server = Server::saying(|body| {
        if body.get("continue_final_message").is_some() {
            return Reply::refused(
                400,
                "Unrecognized request argument supplied: continue_final_message",
                "unknown_parameter",
            );
        }
        Reply::text("one two three").cut()
    });
    let browser = open!(server);
    ask_and_wait(&browser, "count");
    wait_for_text(&browser, ".note", "longest length");
    browser.click(".note button");
    wait_for_text(&browser, "#toasts", "cannot continue");
    wait_for_text(&browser, ".branches", "2/2");
    assert_eq!(last_answer(&browser), "one two three");
    wait_for_text(&browser, ".note button", "Write again");
    browser.finish(&["400 (Bad Request)"]);
}

#[test]
fn conversations_are_kept_apart_found_renamed_deleted_and_brought_back() {
    let server = Server::saying(|body| Reply::text(&format!("You said: {}", asked(body))));
    let browser = open!(server);
    ask_and_wait(&browser, "apples");
    browser.click("#new");
    browser.wait("document.querySelectorAll('.message').length === 0");
    ask_and_wait(&browser, "pears");
    // What one says is not sent with the other.
    assert_eq!(server.requests()[1]["messages"], json!([{"role": "user", "content": "pears"}]));
    browser.wait("document.querySelectorAll('#conversations li').length === 2");
    browser.click("#conversations li:nth-child(2) a");
    wait_for_text(&browser, ".bubble", "apples");
    browser.js("history.back()");
    wait_for_text(&browser, ".bubble", "pears");

    browser.type_into("#search", "said: app");
    browser.wait("document.querySelectorAll('#conversations li').length === 1");
    assert_eq!(browser.text("#conversations a"), "apples");
    browser.type_into("#search", ESCAPE);
    browser.wait("document.querySelectorAll('#conversations li').length === 2");

    browser.click("#conversations li:nth-child(1) button");
    browser.click("#menu button:nth-child(1)");
    browser.type_into(".renaming", &format!("fruit{ENTER}"));
    wait_for_text(&browser, "#title", "fruit");
    assert_eq!(browser.js("return document.title"), "fruit · Moebius");

    browser.click("#conversations li:nth-child(1) button");
    browser.click("#menu button:nth-child(3)");
    wait_for_text(&browser, "#toasts", "Deleted “fruit”.");
    browser.wait(
        "document.querySelectorAll('#conversations li').length === 1 && document.querySelectorAll('.message').length \
         === 0",
    );
    browser.click("#toasts .plain");
    wait_for_text(&browser, "#title", "fruit");
    browser.reload();
    wait_for_text(&browser, ".bubble", "pears");
    browser.wait("document.querySelectorAll('#conversations li').length === 2");
    browser.finish(&[]);
}

#[test]
fn editing_and_regenerating_branch_and_nothing_is_lost() {
    let server = Server::saying(|body| Reply::text(&format!("answer to {}", asked(body))));
    let browser = open!(server);
    ask_and_wait(&browser, "first");
    ask_and_wait(&browser, "second");
    browser.click(".message:nth-child(1) [aria-label=Edit]");
    browser.type_into(".edit textarea", &format!(" edited{ENTER}"));
    wait_for_text(&browser, ".message:last-child .prose", "answer to first edited");
    assert_eq!(browser.count(".message"), 2);
    browser.click("[aria-label='Earlier version']");
    wait_for_text(&browser, ".message:last-child .prose", "answer to second");
    assert_eq!(browser.count(".message"), 4);

    browser.click(".message:last-child [aria-label=Regenerate]");
    wait_for_text(&browser, ".message:last-child .branches", "2/2");
    let messages = &server.requests()[3]["messages"];
    let said: Vec<_> = messages.as_array().unwrap().iter().map(|m| m["content"].as_str().unwrap()).collect();
    assert_eq!(said, ["first", "answer to first", "second"]);
    browser.reload();
    wait_for_text(&browser, ".message:last-child .branches", "2/2");
    wait_for_text(&browser, ".message:nth-child(1) .branches", "1/2");
    browser.finish(&[]);
}

#[test]
fn what_was_just_sent_survives_leaving_at_once() {
    let server = Server::saying(|_| Reply::text("yes no maybe").every(300));
    let browser = open!(server);
    browser.type_into(FIELD, "hello");
    browser.js("document.querySelector('#send').click(); location.reload();");
    wait_for_text(&browser, ".bubble", "hello");
    browser.finish(&[]);
}

#[test]
fn settings_reach_the_server_and_wrong_ones_do_not() {
    let server = Server::saying(|_| Reply::text("yes"));
    let browser = open!(server);
    browser.click("#open-settings");
    browser.type_into("#system", "Be brief.");
    browser.type_into("#temperature", "0.65");
    browser.type_into("#top_k", "40");
    browser.type_into("#max_tokens", "256");
    browser.type_into("#seed", "7");
    browser.type_into("#top_p", "3"); // out of range
    assert!(browser.text("#top_p-about").contains("from 0.01 to 1"));
    browser.type_into("#top_p", ESCAPE);
    browser.wait("!document.querySelector('dialog[open]')");
    ask_and_wait(&browser, "hello");
    let request = server.requests().pop().unwrap();
    assert_eq!(
        request["messages"],
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    );
    assert_eq!(
        [
            &request["temperature"],
            &request["top_k"],
            &request["max_tokens"],
            &request["seed"],
            &request["top_p"],
            &request["model"]
        ],
        [&json!(0.65), &json!(40), &json!(256), &json!(7), &Value::Null, &json!("demo")]
    );
    assert_eq!(request["stream_options"], json!({"include_usage": true}));
    browser.reload();
    wait_for_text(&browser, ".bubble", "hello");
    browser.click("#open-settings");
    assert_eq!(
        browser.js("return document.querySelector('#system').value + document.querySelector('#seed').value"),
        "Be brief.7"
    );
    browser.finish(&[]);
}

#[test]
fn thinking_folds_away_and_is_not_sent_back() {
    let server = Server::saying(|_| Reply::text("It is **4**.").after("Let me add 2 and 2. ").every(150));
    let browser = open!(server);
    ask(&browser, "2+2?");
    wait_for_text(&browser, ".thinking summary", "Thinking");
    browser.wait(IDLE);
    wait_for_text(&browser, ".thinking summary", "Thought for ");
    assert_eq!(last_answer(&browser), ""); // folded, nothing is drawn
    assert_eq!(browser.text(".assistant .body > .prose"), "It is 4.");
    browser.click(".thinking summary");
    wait_for_text(&browser, ".thinking .prose", "Let me add 2 and 2.");
    ask_and_wait(&browser, "sure?");
    assert!(!server.requests()[1].to_string().contains("Let me add"));
    browser.finish(&[]);
}

#[test]
fn refusals_come_with_advice_and_a_key_can_be_given() {
    let server = Server::saying(|body| match (body["key"].as_str(), asked(body)) {
        (None, _) => Reply::refused(401, "Incorrect API key provided", "invalid_api_key"),
        (_, text) if text.contains("long") => {
            Reply::refused(400, "the prompt has 70 tokens", "context_length_exceeded")
        }
        (key, _) => Reply::text(key.unwrap()),
    });
    let browser = open!(server);
    ask_and_wait(&browser, "hello");
    wait_for_text(&browser, ".note.failed", "asks for an API key");
    browser.type_into(".key input", &format!("sesame{ENTER}"));
    wait_for_text(&browser, ".message:last-child .prose", "Bearer sesame");
    browser.reload();
    wait_for_text(&browser, ".message:last-child .prose", "Bearer sesame");
    ask_and_wait(&browser, "too long");
    wait_for_text(&browser, ".note.failed", "no longer fits");
    wait_for_text(&browser, ".note.failed", "the prompt has 70 tokens");
    ask_and_wait(&browser, "short");
    browser.finish(&["401 (Unauthorized)", "400 (Bad Request)"]);
}

#[test]
fn a_server_that_goes_away_is_missed_and_welcomed_back() {
    let mut server = Server::saying(|body| match body.get("continue_final_message") {
        Some(_) => Reply::text("!"),
        None => Reply::text("half an answer").open(),
    });
    let browser = open!(server);
    ask(&browser, "hello");
    wait_for_text(&browser, ".assistant .prose", "half an answer");
    server.go_away();
    wait_for_text(&browser, ".note", "The answer was interrupted.");
    wait_for_text(&browser, "#banners", "No connection to the server.");
    ask_and_wait(&browser, "anyone?");
    wait_for_text(&browser, ".note.failed", "check that it runs");
    server.come_back();
    wait_for_text(&browser, "#toasts", "Connected again.");
    browser.wait("!document.querySelector('.banner')");
    browser.click(".message:nth-child(2) .note button");
    wait_for_text(&browser, ".message:nth-child(2) .prose", "half an answer!");
    browser.finish(&["net::ERR_"]);
}

#[test]
fn a_stream_that_breaks_keeps_what_came() {
    let server = Server::saying(|_| Reply::text("this is so far").every(100).broken());
    let browser = open!(server);
    ask_and_wait(&browser, "hello");
    wait_for_text(&browser, ".note", "The answer was interrupted.");
    assert!("this is so far".starts_with(&last_answer(&browser)) && !last_answer(&browser).is_empty());
    browser.finish(&["net::ERR_"]);
}

#[test]
fn conversations_leave_and_come_back_as_a_file() {
    let server = Server::saying(|body| Reply::text(&format!("answer to {}", asked(body))));
    let browser = open!(server);
    ask_and_wait(&browser, "first");
    browser.click(".message:nth-child(1) [aria-label=Edit]");
    browser.type_into(".edit textarea", &format!(" again{ENTER}"));
    wait_for_text(&browser, ".message:last-child .prose", "answer to first again");
    // The file goes to a blob instead of a folder.
    browser.js("URL.createObjectURL = (blob) => { blob.text().then((text) => (window.saved = text)); return '#' + \
                location.hash.slice(1); }");
    browser.click("#open-settings");
    browser.click("#export");
    browser.wait("window.saved");
    let saved = browser.js("return window.saved");
    let file: Value = serde_json::from_str(saved.as_str().unwrap()).unwrap();
    assert_eq!(
        (&file["format"], file["conversations"][0]["messages"].as_array().unwrap().len()),
        (&json!("moebius-conversations"), 4)
    );

    let import = "const input = document.querySelector('#settings input[type=file]'); const data = new \
                  DataTransfer(); data.items.add(new File([arguments[0]], 'x.json')); input.files = data.files; \
                  input.dispatchEvent(new Event('change'))";
    browser.js_with(import, &saved);
    wait_for_text(&browser, "#toasts", "Imported 1 of 1");
    browser.wait("document.querySelectorAll('#conversations li').length === 2");
    for (text, said) in [
        ("not json", "not a file that this page exported"),
        (
            "{\"format\": \"moebius-conversations\", \"conversations\": [null, {\"messages\": [{\"role\": \
             \"king\"}]}]}",
            "Imported 0 of 2",
        ),
        // A circle of parents must not hang the page.
        (
            "{\"format\": \"moebius-conversations\", \"conversations\": [{\"title\": \"circle\", \"leaf\": 1, \
             \"messages\": [{\"id\": 1, \"parent\": 2, \"role\": \"user\", \"content\": \"a\"}, {\"id\": 2, \
             \"parent\": 1, \"role\": \"user\", \"content\": \"b\"}]}]}",
            "Imported 0 of 1",
        ),
    ] {
        browser.js_with(import, &json!(text));
        wait_for_text(&browser, "#toasts", said);
    }
    browser.type_into("#system", ESCAPE);
    browser.wait("!document.querySelector('dialog[open]')");
    // The copy has both branches.
    browser.js("[...document.querySelectorAll('#conversations a')].find((a) => !a.ariaCurrent).click()");
    wait_for_text(&browser, ".message:nth-child(1) .branches", "2/2");
    assert_eq!((browser.count("#conversations li"), last_answer(&browser).as_str()), (2, "answer to first again"));
    browser.finish(&[]);
}
