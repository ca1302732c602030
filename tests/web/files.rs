//! The page's files as HTTP carries them; no browser.

use std::path::Path;

use crate::fake::Server;

type Response = ureq::http::Response<ureq::Body>;

fn get(server: &Server, path: &str, etag: Option<&str>) -> Response {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let request = agent.get(format!("{}{path}", server.url()));
    let request = if let Some(etag) = etag { request.header("if-none-match", etag) } else { request };
    request.call().unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

/// Names and contents in a folder of the page.
fn files(folder: &str) -> Vec<(String, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/server/web").join(folder);
    let entries = std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap());
    let files = entries.filter(|entry| entry.file_type().unwrap().is_file());
    files.map(|e| (format!("{folder}{}", e.file_name().display()), std::fs::read(e.path()).unwrap())).collect()
}

#[test]
fn every_file_is_served_as_what_it_is() {
    let server = Server::real();
    let all: Vec<_> = ["", "vendor/", "vendor/fonts/"].into_iter().flat_map(files).collect();
    let vendored: usize = all.iter().filter(|(name, _)| name.starts_with("vendor/")).map(|(_, file)| file.len()).sum();
    assert!(vendored < 1 << 20, "{vendored} bytes by others in the binary");
    for (name, content) in all {
        let path = match name.as_str() {
            "index.html" => String::new(),
            "favicon.svg" => name.clone(),
            _ => format!("web/{name}"),
        };
        let mut response = get(&server, &path, None);
        let kind = match Path::new(&name).extension().map_or("", |extension| extension.to_str().unwrap()) {
            "html" => "text/html; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            "svg" => "image/svg+xml",
            "woff2" => "font/woff2",
            _ => "text/plain; charset=utf-8",
        };
        assert_eq!((response.status().as_u16(), header(&response, "content-type")), (200, kind), "{name}");
        assert_eq!(response.body_mut().read_to_vec().unwrap(), content, "{name}");
    }
    assert_eq!(get(&server, "web/nothing.js", None).status(), 404);
    assert_eq!(get(&server, "web/..%2F..%2Fserver.rs", None).status(), 404);
}

#[test]
fn headers_forbid_all_but_our_own_files() {
    let server = Server::real();
    for path in ["", "web/app.js", "favicon.svg"] {
        let response = get(&server, path, None);
        let policy = header(&response, "content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'") && !policy.contains("unsafe") && !policy.contains("http"),
            "{policy}"
        );
        for rule in
            ["script-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "require-trusted-types-for 'script'"]
        {
            assert!(policy.contains(rule), "{rule} in {policy}");
        }
        assert_eq!(header(&response, "x-content-type-options"), "nosniff");
        assert_eq!(header(&response, "referrer-policy"), "no-referrer");
    }
}

#[test]
fn a_browser_that_has_a_file_is_not_sent_it_again() {
    let server = Server::real();
    let first = get(&server, "web/app.js", None);
    let etag = header(&first, "etag").to_string();
    assert_eq!(header(&first, "cache-control"), "no-cache");
    for known in [etag.clone(), format!("W/{etag}"), format!("\"other\", {etag}"), "*".into()] {
        let mut again = get(&server, "web/app.js", Some(&known));
        assert_eq!(again.status(), 304, "{known}");
        assert_eq!(header(&again, "etag"), etag);
        assert!(!header(&again, "content-security-policy").is_empty());
        assert_eq!(again.body_mut().read_to_string().unwrap(), "");
    }
    assert_eq!(get(&server, "web/app.js", Some("\"other\"")).status(), 200);
    assert_ne!(header(&get(&server, "", None), "etag"), etag);
}

/// The page must work where only this server can be reached, and a model's text must never become markup. Libraries by
/// others could write some: the policy forbids it, and pages are tested with it in force.
#[test]
fn files_ask_nobody_else_and_write_no_markup() {
    for (name, content) in files("") {
        let text = String::from_utf8(content).unwrap().replace("http://www.w3.org/2000/svg", "");
        for word in [
            "http://",
            "https://",
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ] {
            let harmless = text.lines().all(|line| !line.contains(word) || line.trim_start().starts_with("//"));
            assert!(harmless, "{name} contains {word}");
        }
        assert!(!text.contains(" style=\"") && !text.contains(" onclick=\""), "{name} has what the policy forbids");
    }
}
