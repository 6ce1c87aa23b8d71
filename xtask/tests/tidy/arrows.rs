//! The imports between the modules of one folder point in one direction, at every depth.

use crate::sources;
use std::collections::{BTreeMap, BTreeSet};

/// The names of a module below the root of its crate.
type ModulePath = Vec<String>;
/// The modules of a folder that import one another.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The lines of code, without comments and without the item behind each `#[cfg(test)]`.
fn code_lines(text: &str) -> Vec<&str> {
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut code = Vec::new();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            code.push(line);
            continue;
        }
        // An item ends with a semicolon or with the brace at its own indentation.
        let indentation = line.len() - line.trim_start().len();
        for line in lines.by_ref() {
            let is_outermost = line.len() - line.trim_start().len() == indentation;
            if is_outermost && (line.ends_with(';') || line.ends_with('}')) {
                break;
            }
        }
    }
    code
}

/// The path of the module in a file below `src`.
fn module_of(file: &str) -> ModulePath {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    match path {
        "lib" | "main" => Vec::new(),
        _ => path.split('/').map(Into::into).collect(),
    }
}

/// The paths of an import, whose names follow in `text`. Braces are resolved.
fn imported_paths(text: &str) -> Vec<ModulePath> {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let (mut path, mut rest) = (Vec::new(), text.trim_start());
    loop {
        if let Some(list) = rest.strip_prefix('{') {
            return split_list(list)
                .into_iter()
                .flat_map(imported_paths)
                .map(|tail| path.iter().cloned().chain(tail).collect())
                .collect();
        }
        let end = rest.find(|character| !is_name(character)).unwrap_or(rest.len());
        if end == 0 {
            return vec![path];
        }
        path.push(rest[..end].to_owned());
        match rest[end..].strip_prefix("::") {
            Some(next) => rest = next,
            None => return vec![path],
        }
    }
}

/// The parts of a list in braces, of which the opening one was read.
fn split_list(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' | ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
                if character == '}' {
                    break;
                }
            }
            '}' => depth -= 1,
            _ => {}
        }
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// The paths below the root of the crate that a module imports.
fn imports_of(module: &[String], code: &str) -> Vec<ModulePath> {
    assert!(!code.contains("use crate as "), "{module:?} renames the root");
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let is_name = |before: char| before.is_alphanumeric() || before == '_';
        if !code[..at].ends_with(is_name) {
            found.extend(imported_paths(&code[at + "crate::".len()..]));
        }
    }
    for (at, _) in code.match_indices("super::") {
        if code[..at].ends_with("super::") {
            continue;
        }
        let (mut base, mut rest) = (module, &code[at..]);
        while let Some(tail) = rest.strip_prefix("super::") {
            (base, rest) = (&base[..base.len().saturating_sub(1)], tail);
        }
        let whole = |tail: ModulePath| base.iter().cloned().chain(tail).collect();
        found.extend(imported_paths(rest).into_iter().map(whole));
    }
    found
}

/// The module that has the item with a path. If the module in the path imports the item from a
/// child, the child has the item.
fn resolve(path: &[String], modules: &BTreeMap<ModulePath, String>) -> ModulePath {
    let mut target = path.to_vec();
    while !target.is_empty() && !modules.contains_key(&target) {
        target.pop();
    }
    let Some(item) = path.get(target.len()) else { return target };
    let code = &modules[&target];
    for (at, _) in code.match_indices("use ") {
        let text = code[at + "use ".len()..].trim_start_matches("self::");
        for imported in imported_paths(text) {
            let child: ModulePath = target.iter().chain(imported.first()).cloned().collect();
            if imported.len() > 1 && imported.last() == Some(item) && modules.contains_key(&child) {
                return child;
            }
        }
    }
    target
}

/// The imports between the modules of each folder of each crate, outside of tests.
fn imports_by_folder() -> BTreeMap<(String, ModulePath), Imports> {
    let mut crates = BTreeMap::<String, BTreeMap<ModulePath, String>>::new();
    for (name, text) in sources() {
        if let Some((folder, file)) = name.split_once("/src/") {
            let modules = crates.entry(folder.to_owned()).or_default();
            modules.insert(module_of(file), code_lines(&text).join("\n"));
        }
    }
    let mut folders = BTreeMap::<_, Imports>::new();
    for (crate_folder, modules) in &crates {
        for (module, code) in modules {
            for path in imports_of(module, code) {
                let target = resolve(&path, modules);
                let common = module.iter().zip(&target).take_while(|(one, other)| one == other);
                let depth = common.count();
                // A module and its parent belong together.
                if let (Some(from), Some(to)) = (module.get(depth), target.get(depth)) {
                    let folder = (crate_folder.clone(), module[..depth].to_vec());
                    let imports = folders.entry(folder).or_default();
                    imports.entry(from.clone()).or_default().insert(to.clone());
                }
            }
        }
    }
    folders
}

#[test]
fn the_modules_of_a_folder_import_one_another_in_one_direction() {
    let folders = imports_by_folder();
    assert!(folders.len() > 50, "imports are not found: {}", folders.len());
    for ((crate_folder, folder), mut modules) in folders {
        // What imports nothing that is left stands at the bottom, what nothing imports at the top.
        // A circle has neither.
        loop {
            let left: BTreeSet<_> = modules.keys().cloned().collect();
            modules.retain(|_, imports| !imports.is_disjoint(&left));
            let imported: BTreeSet<_> = modules.values().flatten().cloned().collect();
            modules.retain(|module, _| imported.contains(module));
            if modules.len() == left.len() {
                break;
            }
        }
        let folder = folder.join("/");
        assert!(modules.is_empty(), "{crate_folder}/src/{folder} has a circle: {modules:#?}");
    }
}

#[test]
fn an_item_that_the_parent_imports_belongs_to_the_child() {
    let path = |text: &str| text.split("::").map(String::from).collect::<ModulePath>();
    let parent = "mod state;\nuse state::{Connection, State};\nuse crate::other::State2;";
    let modules = [("a", parent), ("a::state", ""), ("other", "")];
    let modules = modules.map(|(name, code)| (path(name), code.to_owned())).into();
    assert_eq!(resolve(&path("a::State"), &modules), path("a::state"));
    assert_eq!(resolve(&path("a::State2"), &modules), path("a"));
    assert_eq!(resolve(&path("a::state::x"), &modules), path("a::state"));
}

#[test]
fn paths_of_an_import_are_found() {
    let module: ModulePath = ["a", "b"].map(String::from).to_vec();
    let code = "use crate::x::{y, z::{Z, w}};\nuse super::c::d;\nsuper::super::e::f(); mycrate::g";
    let found: Vec<_> = imports_of(&module, code).iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["x::y", "x::z::Z", "x::z::w", "a::c::d", "e::f"]);
}
