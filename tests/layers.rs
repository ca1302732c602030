//! `src/lib.rs` draws the crate's map, each room's page that of the room; this holds the files to both.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Files and folders with lines of more than 120 columns, and why.
const WIDE: &[(&str, &str)] = &[
    ("Cargo.lock", "written by cargo"),
    ("CHANGELOG.md", "one line for each change"),
    ("benches/record", "measurements as programs wrote them"),
    ("demo/moe-", "checkpoints as transformers wrote them"),
    ("kernels/resources.txt", "written by scripts/kernel-resources"),
    ("src/server/web/vendor", "libraries of others"),
    ("src/hub/gguf/tokenizer.rs", "regular expressions of tokenizers"),
    ("tests/clients/hermes.jinja", "a chat template of a model"),
    ("tests/content/models.rs", "chat templates of models"),
    ("tests/data", "data of others"),
    ("tests/fixtures", "checkpoints as transformers wrote them"),
    ("tests/reply/forms.rs", "replies as models write them"),
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The names on the last map of a page, bottom first.
fn map(page: &str) -> Vec<String> {
    let blocks: Vec<&str> = page.split("//! ```").collect();
    let Some(block) = blocks.iter().rfind(|block| block.starts_with("text\n")) else { return Vec::new() };
    let names = block.lines().skip(1).filter_map(|line| line.strip_prefix("//! ")?.split("   ").next());
    names.flat_map(|names| names.split(',').map(|name| name.trim().to_string())).collect()
}

/// The modules that a page declares, but for its tests.
fn declared(page: &str) -> BTreeSet<String> {
    let lines = page.lines().filter_map(|line| line.split_once("mod ")?.1.strip_suffix(';'));
    lines.filter(|name| *name != "tests").map(String::from).collect()
}

/// The code of a file: without comments and unit tests.
fn code(path: &Path) -> String {
    let text = read(path);
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// What a text names behind `prefix`: `prefix::name`, or each of `prefix::{...}`.
fn named(code: &str, prefix: &str) -> BTreeSet<String> {
    let name = |s: &str| s.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = BTreeSet::new();
    let mut before = code.split(prefix).next().unwrap();
    for rest in code.split(prefix).skip(1) {
        if !before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':') {
            match rest.strip_prefix('{') {
                Some(list) => found.extend(list.split('}').next().unwrap().split(',').map(name)),
                None => drop(found.insert(name(rest))),
            }
        }
        before = rest;
    }
    found
}

/// All files of a folder, the tests of its units left out.
fn files(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let paths = entries.map(|entry| entry.unwrap().path());
    let all = paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    all.filter(|path| path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs")).collect()
}

/// A module's file and all below it.
fn files_of(module: &Path) -> Vec<PathBuf> {
    let mut all = files(module);
    all.push(module.with_extension("rs"));
    all
}

/// The rooms, bottom first; `error` and `log` are files.
fn rooms() -> Vec<String> {
    map(&read(&source().join("lib.rs"))).split_off(2)
}

#[test]
fn every_room_is_on_the_map() {
    let page = read(&source().join("lib.rs"));
    assert_eq!(map(&page).into_iter().collect::<BTreeSet<_>>(), declared(&page));
    assert!(rooms().len() <= 14, "a room more than a head holds");
}

#[test]
fn imports_go_down() {
    let lib = map(&read(&source().join("lib.rs")));
    let rung = |name: &str| lib.iter().position(|m| m == name);
    for room in rooms() {
        let mut imported = BTreeSet::new();
        for file in files_of(&source().join(&room)) {
            for name in named(&code(&file), "crate::") {
                assert!(rung(&name) <= rung(&room), "{} imports {name}, which stands behind it", file.display());
                imported.insert(name);
            }
        }
        imported.retain(|name| rung(name) > Some(1) && *name != room);
        let imported: Vec<_> = lib.iter().filter(|name| imported.contains(*name)).map(String::as_str).collect();
        let said = match imported.split_last() {
            _ if room == "config" => continue,
            _ if room == "cli" => "every room".to_string(),
            None => "no other room".to_string(),
            Some((last, [])) => last.to_string(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
        };
        let page = read(&source().join(&room).with_extension("rs"));
        let words = page.replace("\n//! ", " ");
        assert!(words.contains(&format!("Imports {said}. Read ")), "{room}.rs should say: Imports {said}. Read ...");
    }
}

#[test]
fn imports_go_down_within_rooms_too() {
    for room in rooms() {
        let folder = source().join(&room);
        let page = read(&folder.with_extension("rs"));
        let map = map(&page);
        assert_eq!(map.iter().cloned().collect::<BTreeSet<_>>(), declared(&page), "the map of {room}.rs");
        let rung = |name: &str| map.iter().position(|m| m == name);
        for module in &map {
            for file in files_of(&folder.join(module)) {
                let depth = file.strip_prefix(&folder).unwrap().components().count();
                let code = code(&file);
                let siblings = named(&code, &"super::".repeat(depth));
                for name in siblings.into_iter().chain(named(&code, &format!("crate::{room}::"))) {
                    let is_fine = rung(&name) <= rung(module);
                    assert!(is_fine, "{} imports {name}, which stands above it on the room's map", file.display());
                }
            }
        }
    }
}

/// All files below a folder, but for what git ignores.
fn all_files(folder: &Path) -> Vec<PathBuf> {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        let is_hidden = name.starts_with('.') && ![".cargo", ".ci", ".clang-format"].contains(&&*name);
        !is_hidden && name != "target" && name != "__pycache__"
    };
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(is_ours);
    paths.flat_map(|path| if path.is_dir() { all_files(&path) } else { vec![path] }).collect()
}

#[test]
fn lines_have_at_most_120_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for path in all_files(root) {
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let Ok(text) = std::fs::read_to_string(&path) else { continue }; // images and weights are no text
        if WIDE.iter().any(|(wide, _)| name.starts_with(wide)) {
            continue;
        }
        // A row of a table in Markdown is one line.
        let is_row = |line: &str| name.ends_with(".md") && line.starts_with('|');
        let long = text.lines().position(|line| line.chars().count() > 120 && !is_row(line)).map(|i| i + 1);
        assert!(long.is_none(), "{name}:{} has more than 120 columns", long.unwrap_or_default());
    }
}

/// `path:function` and `path` between backticks, in a page.
fn places(page: &str) -> Vec<(String, Option<String>)> {
    let roots = ["src/", "cache/", "kernels/", "python/", "tests/"];
    let spans = page.split('`').skip(1).step_by(2).filter(|span| roots.iter().any(|root| span.starts_with(root)));
    let plain = spans.filter(|span| !span.contains(|c: char| " <*{".contains(c)));
    plain.map(|span| span.split_once(':').map_or((span.into(), None), |(p, f)| (p.into(), Some(f.into())))).collect()
}

#[test]
fn pages_name_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for page in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let places = places(&read(&root.join(page)));
        assert!(places.len() > 3, "{page} names hardly a place");
        for (path, function) in places {
            assert!(root.join(&path).exists(), "{page} names {path}, which is not there");
            let Some(function) = function else { continue };
            let has = read(&root.join(&path)).contains(&format!("fn {function}"));
            assert!(has, "{page} names {path}:{function}, which is not there");
        }
    }
}
