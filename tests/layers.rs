//! `src/lib.rs` draws the crate's map; this holds the files to it.
#![allow(clippy::unwrap_used)] // helpers of tests are outside #[test] functions

use std::path::{Path, PathBuf};

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// The modules of the map, bottom first.
fn map() -> Vec<String> {
    let lib = std::fs::read_to_string(source().join("lib.rs")).unwrap();
    let block = lib.split("//! ```").nth(1).unwrap().lines().skip(1);
    let names = block.filter_map(|line| line.strip_prefix("//! ")?.split("   ").next());
    names.flat_map(|names| names.split(',').map(|name| name.trim().to_string())).collect()
}

/// Modules that a text names as `crate::name` or in `crate::{...}`, its unit tests left out.
fn imports(text: &str) -> Vec<String> {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let name = |s: &str| s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = Vec::new();
    for rest in code.split("crate::").skip(1) {
        match rest.strip_prefix('{') {
            Some(list) => found.extend(list.split('}').next().unwrap().split(',').map(|item| name(item.trim()))),
            None => found.push(name(rest)),
        }
    }
    found
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn every_module_is_on_the_map_once() {
    let lib = std::fs::read_to_string(source().join("lib.rs")).unwrap();
    let mut modules: Vec<_> = lib.lines().filter_map(|l| l.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    let mut map = map();
    map.sort();
    modules.sort_unstable();
    assert_eq!(map, modules);
}

#[test]
fn imports_go_down() {
    let map = map();
    let rung = |name: &str| map.iter().position(|m| m == name);
    let mut upward = Vec::new();
    for file in files(&source()) {
        let place = file.strip_prefix(source()).unwrap().with_extension("");
        let Some(own) = rung(place.iter().next().unwrap().to_str().unwrap()) else { continue }; // lib, main, cli
        if place.ends_with("tests") {
            continue;
        }
        let found = imports(&std::fs::read_to_string(&file).unwrap());
        upward.extend(
            found
                .into_iter()
                .filter(|name| rung(name) > Some(own))
                .map(|name| format!("{} imports {name}", place.display())),
        );
    }
    assert!(upward.is_empty(), "{upward:#?}");
}
