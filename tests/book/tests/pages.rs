//! Tests that the pages of the book fit together: each is in the table of contents and among the tested ones, each link
//! has a target, and each named variable exists.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use gpumem_book_tests::PAGES;

/// Pages that only include a document of the project.
const INCLUDES: &[&str] = &["architecture.md", "measurements.md"];

/// Variables that are not in the table of `environment.md`: the project's own test variables.
const OTHER_VARIABLES: &[&str] = &["GPUMEM_DEVICE", "GPUMEM_STANDIN_FAIL"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("this is in a checkout")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there").flatten() {
        let path = entry.path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// Returns each page by its name in the book, without the table of contents.
fn pages() -> BTreeMap<String, String> {
    let source = root().join("docs/book/src");
    let mut found = Vec::new();
    files(&source, &mut found);
    let name = |path: &Path| path.strip_prefix(&source).expect("it was found there").display().to_string();
    let pages = found.iter().map(|path| (name(path), read(path)));
    pages.filter(|(name, _)| name != "SUMMARY.md").collect()
}

/// Returns the text without fenced blocks and inline code, which have no links.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let mut prose = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            prose.extend(line.split('`').step_by(2));
            prose.push('\n');
        }
    }
    prose
}

/// Returns the targets of a text's links, and the files that it includes.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = |start: &'static str, end: &'static str| {
        prose
            .split(start)
            .skip(1)
            .filter_map(move |rest| rest.split_once(end).map(|(target, _)| target.trim().to_owned()))
    };
    targets("](", ")").chain(targets("{{#include", "}}")).collect()
}

/// Returns the names that mdbook and GitHub give to the headings of a text.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings =
        text.lines().filter_map(|line| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim()));
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// Returns the errors in the links of one document.
fn broken(path: &Path, text: &str) -> Vec<String> {
    let mut broken = Vec::new();
    for link in links(text).into_iter().filter(|link| !link.starts_with("https://")) {
        let (file, anchor) = link.split_once('#').map_or((&*link, None), |(file, anchor)| (file, Some(anchor)));
        let target = if file.is_empty() { path.to_owned() } else { path.parent().expect("it is a file").join(file) };
        let found = match anchor {
            None => target.exists(),
            Some(anchor) => target.is_file() && anchors(&read(&target)).contains(anchor),
        };
        if !found {
            broken.push(format!("{}: {link}", path.display()));
        }
    }
    broken
}

#[test]
fn each_page_is_in_the_table_of_contents() {
    let summary = read(&root().join("docs/book/src/SUMMARY.md"));
    let listed: BTreeSet<_> = links(&summary).into_iter().collect();
    let pages: BTreeSet<_> = pages().into_keys().collect();
    assert_eq!(listed, pages);
}

#[test]
fn the_code_of_each_page_is_tested() {
    let tested: BTreeSet<_> = PAGES.iter().chain(INCLUDES).map(|page| (*page).to_owned()).collect();
    let pages: BTreeSet<_> = pages().into_keys().collect();
    assert_eq!(tested, pages, "src/lib.rs lists the pages");
}

#[test]
fn no_link_is_broken() {
    let root = root();
    let mut documents: Vec<PathBuf> =
        ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"].iter().map(|name| root.join(name)).collect();
    files(&root.join("docs"), &mut documents);
    let all: Vec<_> = documents.iter().map(|path| (path, read(path))).collect();
    assert!(all.iter().map(|(_, text)| links(text).len()).sum::<usize>() > 50, "links are found");
    let broken: Vec<_> = all.iter().flat_map(|(path, text)| broken(path, text)).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn a_broken_link_is_found() {
    let page = root().join("docs/book/src/numbers.md");
    let found = |link: &str| broken(&page, &format!("a [link]({link}), `no [link](nowhere.md)`")).is_empty();
    assert!(found("where.md") && found("#used-and-peaked") && found("migration/fastai.md#what-differs"));
    assert!(!broken(&page, "{{#include ../../NOWHERE.md}}").is_empty());
    assert!(!found("nowhere.md") && !found("#nowhere") && !found("where.md#used-and-peaked"));
}

/// A code block marked `rust` is compiled and run, and one marked `rust,no_run` is only compiled. Code marked `rs` is not tested;
/// only code of frameworks that this project does not use may be marked so.
#[test]
fn code_is_tested_unless_it_needs_another_framework() {
    for (name, text) in pages() {
        let mut is_code = false;
        for line in text.lines().filter(|line| line.starts_with("```")) {
            is_code = !is_code;
            if is_code {
                let known =
                    ["rust", "rust,no_run", "console", "text", "python", "sql", "toml", "yaml"].contains(&&line[3..]);
                assert!(known || line == "```rs" && name.starts_with("frameworks/"), "{name}: {line}");
            }
        }
        assert!(!is_code, "{name} has a block without an end");
    }
}

#[test]
fn each_variable_exists() {
    let pages = pages();
    let is_row = |line: &&str| line.starts_with("| `GPUMEM_");
    let row = |line: &str| line.split('`').nth(1).expect("a name in the first column").to_owned();
    let table: BTreeSet<String> = pages["environment.md"].lines().filter(is_row).map(row).collect();
    let readme = ("README.md".to_owned(), read(&root().join("README.md")));
    for (name, text) in pages.iter().map(|(name, text)| (name.clone(), text.clone())).chain([readme]) {
        let words = text.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
        for word in words.filter(|word| word.starts_with("GPUMEM_") && *word != "GPUMEM_") {
            let known = table.contains(word) || OTHER_VARIABLES.contains(&word);
            assert!(known, "{name} names {word}, which is not in environment.md");
        }
    }
}
