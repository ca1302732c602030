//! Reads from `kernels/*.cu` what a launch must know of every kernel, and writes it as Rust: see `common.cuh`.
//!
//! This is no C++ compiler. It knows macros, `KERNEL`, `KERNEL_BLOCKS`, `KERNEL_TILE`, `constexpr int` and the structs
//! that kernels take. Whatever else such a declaration says is an error with a sentence.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

/// A word, a number, or a sign.
type Token = String;
type Result<T> = std::result::Result<T, String>;

/// All that Rust is told.
#[derive(Default)]
pub(crate) struct Contract {
    /// By name.
    pub(crate) kernels: BTreeMap<String, Kernel>,
    /// Structs that kernels take, by name: their fields, as Rust.
    pub(crate) structs: BTreeMap<String, Vec<(String, String)>>,
    /// Parameters that kernels share, by name, as Rust.
    pub(crate) lists: BTreeMap<String, Vec<String>>,
    /// By file: constants of it and of the headers that it includes.
    pub(crate) constants: BTreeMap<String, BTreeMap<String, i64>>,
}

/// What a launch of one kernel must know.
#[derive(Debug, PartialEq)]
pub(crate) struct Kernel {
    /// The file, without its ending.
    pub(crate) file: String,
    pub(crate) threads: i64,
    /// Bytes of dynamic shared memory: without `HAS_WGMMA`, and with it.
    pub(crate) shared_bytes: [i64; 2],
    /// Types of the parameters, as Rust, or the name of a list of them.
    pub(crate) parameters: Parameters,
    pub(crate) tile: [i64; 3],
}

#[derive(Debug, PartialEq)]
pub(crate) enum Parameters {
    Own(Vec<String>),
    List(String),
}

/// Reads all of `dir`.
pub(crate) fn read(dir: &Path) -> Result<Contract> {
    let mut contract = Contract::default();
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "cu"));
    paths.sort();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut unit = Unit { file: name, ..Unit::default() };
        let read = unit.include(&path).and_then(|()| unit.declare(&mut contract));
        read.map_err(|why| format!("{}: {why}", path.display()))?;
    }
    Ok(contract)
}

struct Macro {
    parameters: Option<Vec<Token>>,
    body: Vec<Token>,
}

impl Macro {
    /// What the macro whose arguments begin at `at` becomes, and where they have ended.
    fn replaced(&self, tokens: &[Token], at: usize) -> Result<(Vec<Token>, usize)> {
        let Some(parameters) = &self.parameters else { return Ok((self.body.clone(), at)) };
        let (arguments, end) = arguments(tokens, at)?;
        if arguments.len() != parameters.len() {
            let name = &tokens[at - 1];
            return Err(format!("{name} takes {} arguments, not {}", parameters.len(), arguments.len()));
        }
        let value = |t: &Token| parameters.iter().position(|p| p == t).map(|i| arguments[i].clone());
        let replaced = self.body.iter().flat_map(|t| value(t).unwrap_or_else(|| vec![t.clone()]));
        Ok((paste(replaced), end))
    }
}

/// A `.cu` with what it includes.
#[derive(Default)]
struct Unit {
    file: String,
    macros: HashMap<String, Macro>,
    tokens: Vec<Token>,
    constants: BTreeMap<String, i64>,
    structs: HashMap<String, Vec<Token>>,
}

/// Macros that mean what this file makes of them.
const DECLARATIONS: [&str; 5] = ["KERNEL", "KERNEL_BLOCKS", "KERNEL_TILE", "ON_HOPPER", "AS_BYTES"];

impl Unit {
    /// Takes in macros and code of a file. Conditions: `HAS_WGMMA` and `EMULATED` are defined.
    fn include(&mut self, path: &Path) -> Result<()> {
        let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        let text = without_comments(&text).replace("\\\n", " ");
        let mut taken = vec![true];
        for line in text.lines().map(str::trim) {
            let here = taken.iter().all(|taken| *taken);
            let Some(directive) = line.strip_prefix('#') else {
                if here {
                    self.tokens.extend(tokens(line));
                }
                continue;
            };
            let (word, rest) = directive.trim().split_once(' ').unwrap_or((directive.trim(), ""));
            match word {
                "ifdef" if ["HAS_WGMMA", "EMULATED"].contains(&rest) => taken.push(true),
                "else" => {
                    let branch = taken.last_mut().ok_or("#else without #ifdef")?;
                    *branch = !*branch;
                }
                "endif" => drop(taken.pop()),
                "define" if here => self.define(rest)?,
                "include" if here && rest.ends_with(".cuh\"") => {
                    self.include(&path.with_file_name(rest.trim_matches('"')))?
                }
                "define" | "include" | "pragma" => {}
                _ => return Err(format!("`{line}` is not understood: conditions are #ifdef HAS_WGMMA or EMULATED")),
            }
        }
        Ok(())
    }

    fn define(&mut self, text: &str) -> Result<()> {
        let name: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let mut body = tokens(&text[name.len()..]);
        // A bracket right behind the name holds parameters.
        let parameters = match text[name.len()..].starts_with('(') {
            true => {
                let end = body.iter().position(|t| t == ")").ok_or_else(|| format!("#define {name} has no `)`"))?;
                let parameters = body[1..end].iter().filter(|t| *t != ",").cloned().collect();
                body.drain(..=end);
                Some(parameters)
            }
            false => None,
        };
        if !DECLARATIONS.contains(&name.as_str()) {
            self.macros.insert(name, Macro { parameters, body });
        }
        Ok(())
    }

    /// The tokens with all macros replaced, but those of [`DECLARATIONS`] and lists of parameters.
    fn expand(&self, tokens: &[Token]) -> Result<Vec<Token>> {
        let mut out = Vec::new();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            let Some(found) = self.macros.get(token).filter(|_| !token.ends_with("_ARGUMENTS")) else {
                out.push(token.clone());
                continue;
            };
            if found.parameters.is_some() && tokens.get(at).is_none_or(|t| t != "(") {
                out.push(token.clone());
                continue;
            }
            let (replaced, end) = found.replaced(tokens, at)?;
            at = end;
            out.extend(self.expand(&replaced)?);
        }
        Ok(out)
    }

    /// Reads what stands at the file's level: constants, structs, kernels.
    fn declare(&mut self, contract: &mut Contract) -> Result<()> {
        let tokens = self.expand(&self.tokens)?;
        let (mut at, mut depth) = (0, 0);
        let mut tiles = Vec::new();
        while let Some(token) = tokens.get(at) {
            at += 1;
            match token.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                "constexpr" if depth == 0 && tokens[at] == "int" && tokens[at + 2] == "=" => {
                    let end = at + until(&tokens[at..], ";")?;
                    for declared in split(&tokens[at + 1..end]) {
                        let (name, value) = (declared[0].clone(), self.number(&declared[2..])?);
                        self.constants.insert(name, value);
                    }
                    at = end;
                }
                "struct" if depth == 0 => {
                    let body = at + tokens[at..].iter().position(|t| t == "{" || t == ";").unwrap_or(0);
                    if tokens[body] == "{" {
                        let end = body + until(&tokens[body..], "}")?;
                        self.structs.insert(tokens[body - 1].clone(), tokens[body + 1..end].to_vec());
                        at = end + 1;
                    }
                }
                "KERNEL_TILE" => {
                    let (arguments, end) = arguments(&tokens, at)?;
                    let mut tile = [0; 3];
                    if arguments.len() < 2 || arguments.len() > 4 {
                        return Err(format!("KERNEL_TILE({}) has one to three numbers", arguments[0].concat()));
                    }
                    for (tile, argument) in tile.iter_mut().zip(&arguments[1..]) {
                        *tile = self.number(argument)?;
                    }
                    tiles.push((arguments[0].concat(), tile));
                    at = end;
                }
                "KERNEL" | "KERNEL_BLOCKS" => {
                    let (mut arguments, end) = arguments(&tokens, at)?;
                    if token == "KERNEL_BLOCKS" && arguments.len() > 2 {
                        arguments.remove(2); // blocks of a multiprocessor: nothing of a launch
                    }
                    let name = arguments[0].concat();
                    let kernel = self.kernel(&arguments, contract).map_err(|why| format!("{name}: {why}"))?;
                    if contract.kernels.insert(name.clone(), kernel).is_some() {
                        return Err(format!("there are two kernels {name}"));
                    }
                    at = end;
                }
                _ => {}
            }
        }
        for (name, tile) in tiles {
            let kernel = contract.kernels.get_mut(&name).filter(|kernel| kernel.file == self.file);
            kernel.ok_or_else(|| format!("KERNEL_TILE({name}): there is no such kernel here"))?.tile = tile;
        }
        contract.constants.insert(self.file.clone(), std::mem::take(&mut self.constants));
        Ok(())
    }

    /// `KERNEL(name, threads, shared bytes, parameters...)`
    fn kernel(&self, arguments: &[Vec<Token>], contract: &mut Contract) -> Result<Kernel> {
        let [_, threads, shared, parameters @ ..] = arguments else {
            return Err("KERNEL takes a name, threads, bytes of shared memory, and parameters".into());
        };
        let shared_bytes = match shared.first().is_some_and(|t| t == "ON_HOPPER") {
            false => [self.number(shared)?; 2],
            true => match &self::arguments(shared, 1)?.0[..] {
                [hopper, other] => [self.number(other)?, self.number(hopper)?],
                _ => return Err("ON_HOPPER takes two numbers".into()),
            },
        };
        let parameters = match parameters {
            [list] if list.first().is_some_and(|t| t.ends_with("_ARGUMENTS")) => {
                let name = camel_case(&list[0]);
                let found = self.macros.get(&list[0]).ok_or_else(|| format!("there is no {}", list[0]))?;
                let types = self.parameters(&split(&found.replaced(list, 1)?.0), contract)?;
                if *contract.lists.entry(name.clone()).or_insert_with(|| types.clone()) != types {
                    return Err(format!("there are two lists {}", list[0]));
                }
                Parameters::List(name)
            }
            own => Parameters::Own(self.parameters(own, contract)?),
        };
        Ok(Kernel { file: self.file.clone(), threads: self.number(threads)?, shared_bytes, parameters, tile: [0; 3] })
    }

    fn parameters(&self, parameters: &[Vec<Token>], contract: &mut Contract) -> Result<Vec<String>> {
        parameters.iter().map(|tokens| self.declarator(tokens, None, contract).map(|(_, ty)| ty)).collect()
    }

    /// `[const] [__grid_constant__] type [*] [name] [[n]]`, or after a comma what follows the type. Returns name and
    /// Rust type.
    fn declarator<'a>(
        &self,
        tokens: &'a [Token],
        base: Option<&'a str>,
        contract: &mut Contract,
    ) -> Result<(String, String)> {
        let mut rest =
            tokens.iter().map(String::as_str).filter(|t| !["const", "__grid_constant__"].contains(t)).peekable();
        let base = base.or_else(|| rest.next()).unwrap_or_default();
        let base = if base == "long" && rest.next_if_eq(&"long").is_some() { "long long" } else { base };
        let base = if base == "AS_BYTES" { rest.nth(2).map_or("", |_| "void") } else { base };
        let pointer = rest.next_if_eq(&"*").is_some();
        let name = rest.next().unwrap_or_default().to_owned();
        let mut ty = match pointer {
            true => format!("Address<{}>", self.pointee(base, contract)?),
            false => self.value(base, contract)?,
        };
        if rest.next_if_eq(&"[").is_some() {
            let count: Vec<Token> = rest.by_ref().take_while(|t| *t != "]").map(str::to_owned).collect();
            ty = format!("[{ty}; {}]", self.number(&count)?);
        }
        match rest.next() {
            None => Ok((name, ty)),
            Some(_) => Err(format!("the parameter `{}` is not understood", tokens.join(" "))),
        }
    }

    fn pointee(&self, base: &str, contract: &mut Contract) -> Result<String> {
        Ok(match base {
            "bf16" => "bf16".into(),
            // Of vectors Rust sees the numbers; uint4 is 16 bytes of anything.
            "float2" | "float4" => "f32".into(),
            "int2" | "int4" => "i32".into(),
            "uint8_t" | "void" | "uint4" => "u8".into(),
            _ => self.value(base, contract)?,
        })
    }

    fn value(&self, base: &str, contract: &mut Contract) -> Result<String> {
        Ok(match base {
            "int" => "i32".into(),
            "float" => "f32".into(),
            "uint32_t" => "u32".into(),
            "uint64_t" => "u64".into(),
            "int64_t" | "long long" => "i64".into(),
            "TensorMap" => "TensorMap".into(),
            _ => {
                let body = self.structs.get(base).ok_or_else(|| format!("the type `{base}` is not known"))?;
                let fields = self.fields(body, contract).map_err(|why| format!("struct {base}: {why}"))?;
                if *contract.structs.entry(base.into()).or_insert_with(|| fields.clone()) != fields {
                    return Err(format!("there are two structs {base}"));
                }
                base.into()
            }
        })
    }

    fn fields(&self, body: &[Token], contract: &mut Contract) -> Result<Vec<(String, String)>> {
        let mut fields = Vec::new();
        for line in body.split(|t| t == ";").filter(|line| !line.is_empty()) {
            let base = line.iter().find(|t| *t != "const").map(String::as_str);
            for (i, declared) in split(line).iter().enumerate() {
                fields.push(self.declarator(declared, base.filter(|_| i > 0), contract)?);
            }
        }
        Ok(fields)
    }

    /// Integers, constants, `+ - * / <<` and brackets.
    fn number(&self, tokens: &[Token]) -> Result<i64> {
        let mut rest = tokens;
        match self.sum(&mut rest) {
            Some(value) if rest.is_empty() => Ok(value),
            _ => Err(format!(
                "`{}` is no number: integers, constants, + - * / << and brackets make one",
                tokens.join(" ")
            )),
        }
    }

    fn sum(&self, rest: &mut &[Token]) -> Option<i64> {
        let mut value = self.product(rest)?;
        while let Some(sign) = take(rest, &["+", "-", "<<"]) {
            let next = self.product(rest)?;
            value = match sign.as_str() {
                "+" => value + next,
                "-" => value - next,
                _ => value << next,
            };
        }
        Some(value)
    }

    fn product(&self, rest: &mut &[Token]) -> Option<i64> {
        let mut value = self.atom(rest)?;
        while let Some(sign) = take(rest, &["*", "/"]) {
            let next = self.atom(rest)?;
            value = if sign == "*" { value * next } else { value.checked_div(next)? };
        }
        Some(value)
    }

    fn atom(&self, rest: &mut &[Token]) -> Option<i64> {
        let (token, after) = rest.split_first()?;
        *rest = after;
        if token == "(" {
            let value = self.sum(rest)?;
            return take(rest, &[")"]).map(|_| value);
        }
        token.parse().ok().or_else(|| self.constants.get(token).copied())
    }
}

fn take(rest: &mut &[Token], signs: &[&str]) -> Option<Token> {
    let (first, after) = rest.split_first().filter(|(first, _)| signs.contains(&first.as_str()))?;
    *rest = after;
    Some(first.clone())
}

fn without_comments(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        out.push_str(line.split_once("//").map_or(line, |(code, _)| code));
        out.push('\n');
    }
    out
}

fn tokens(line: &str) -> Vec<Token> {
    let (mut out, mut rest) = (Vec::new(), line.trim_start());
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let len = match first {
            '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
            _ if word(first) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("##") || rest.starts_with("<<") => 2,
            _ => first.len_utf8(),
        };
        out.push(rest[..len].to_owned());
        rest = rest[len..].trim_start();
    }
    out
}

/// Where the first `end` outside of brackets is.
fn until(tokens: &[Token], end: &str) -> Result<usize> {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate() {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if token == end && depth <= 0 {
            return Ok(i);
        }
    }
    Err(format!("there is no `{end}` behind `{}`", tokens.iter().take(8).cloned().collect::<Vec<_>>().join(" ")))
}

/// What stands in the brackets that begin at `at`, and where they have ended.
fn arguments(tokens: &[Token], at: usize) -> Result<(Vec<Vec<Token>>, usize)> {
    if tokens.get(at).is_none_or(|t| t != "(") {
        return Err(format!("`(` is missing behind `{}`", tokens[at - 1]));
    }
    let end = at + until(&tokens[at..], ")")?;
    Ok((split(&tokens[at + 1..end]), end + 1))
}

/// Split at commas outside of brackets.
fn split(tokens: &[Token]) -> Vec<Vec<Token>> {
    let (mut out, mut depth) = (vec![Vec::new()], 0);
    for token in tokens {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if token == "," && depth == 0 {
            out.push(Vec::new());
        } else if let Some(last) = out.last_mut() {
            last.push(token.clone());
        }
    }
    out
}

/// `a ## b` is `ab`.
fn paste(tokens: impl Iterator<Item = Token>) -> Vec<Token> {
    let (mut out, mut pasting) = (Vec::<Token>::new(), false);
    for token in tokens {
        match out.last_mut() {
            _ if token == "##" => pasting = true,
            Some(last) if std::mem::take(&mut pasting) => last.push_str(&token),
            _ => out.push(token),
        }
    }
    out
}

/// `LINEAR_ARGUMENTS` as `LinearArguments`.
fn camel_case(name: &str) -> String {
    let word = |word: &str| word[..1].to_owned() + &word[1..].to_lowercase();
    name.split('_').filter(|w| !w.is_empty()).map(word).collect()
}

/// `LinearArguments` as `LINEAR_KERNELS`.
fn upper_case(list: &str) -> String {
    let stem = list.strip_suffix("Arguments").unwrap_or(list);
    let words = stem.char_indices().flat_map(|(i, c)| {
        let begins = i > 0 && c.is_uppercase();
        begins.then_some('_').into_iter().chain([c.to_ascii_uppercase()])
    });
    words.collect::<String>() + "_KERNELS"
}

impl Contract {
    /// The Rust of `src/cuda/kernels.rs`.
    pub(crate) fn rust(&self) -> String {
        let mut lines = vec!["// Written by build.rs from kernels/*.cu.".to_owned()];
        for (name, fields) in &self.structs {
            lines.push("/// As a kernel takes it.\n#[derive(Clone, Copy)]\n#[repr(C)]".into());
            lines.push(format!("pub(crate) struct {name} {{"));
            lines.extend(fields.iter().map(|(field, ty)| format!("    pub(crate) {field}: {ty},")));
            lines.push("}\n// SAFETY: fields and their order are those of the kernels' struct.".into());
            lines.push(format!("unsafe impl Argument for {name} {{}}"));
        }
        let tuple = |types: &[String]| format!("({},)", types.join(", "));
        for (name, types) in &self.lists {
            lines.push(format!("pub(crate) type {name} = {};", tuple(types)));
        }
        for list in self.lists.keys() {
            let of = |kernel: &Kernel| kernel.parameters == Parameters::List(list.clone());
            let names: Vec<_> =
                self.kernels.iter().filter(|(_, kernel)| of(kernel)).map(|(name, _)| &name[..]).collect();
            lines.push(format!(
                "/// All kernels that take these.\npub(crate) const {}: &[Kernel<{list}>] =",
                upper_case(list)
            ));
            lines.push(format!("    &[{}];", names.join(", ")));
        }
        for (name, Kernel { file, threads, shared_bytes, parameters, tile }) in &self.kernels {
            let types = match parameters {
                Parameters::Own(types) => tuple(types),
                Parameters::List(list) => list.clone(),
            };
            lines.push(format!("/// Of kernels/{file}.cu.\npub(crate) const {name}: Kernel<{types}> ="));
            lines.push(format!("    Kernel::new({name:?}, {threads}, {shared_bytes:?}, {tile:?});"));
        }
        for (file, constants) in &self.constants {
            lines.push(format!("/// Constants of kernels/{file}.cu.\npub(crate) mod {file} {{"));
            lines.extend(constants.iter().map(|(name, n)| format!("    pub(crate) const {name}: usize = {n};")));
            lines.push("}".into());
        }
        lines.push("#[cfg(test)]\npub(crate) const ALL: &[Row] = &[".into());
        lines.extend(self.kernels.keys().map(|name| format!("    {name}.row(),")));
        lines.push("];\n".into());
        lines.join("\n")
    }
}
