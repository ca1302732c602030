// A light highlighter: one pass of one pattern per language. It knows comments, strings, numbers, keywords, calls and
// types; what it does not know stays plain.

const MAX_CHARS = 100_000; // longer code is shown plain

const words = (text) => new Set(text.trim().split(/\s+/));
// Patterns are multi-line, where $ is the end of a line. What runs to the end of the text matches always: no second
// look.
const END = "(?![^])";
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|${END})`;
const HASH = String.raw`#[^\n]*`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[^])*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[^])*'?`;
const BACKTICK = "`(?:[^`\\\\]|\\\\[^])*`?";
const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;

const C = `
  auto break case catch class const constexpr continue default delete do else enum extern false final for friend
  goto if inline namespace new noexcept nullptr NULL operator override private protected public register return
  sizeof static struct switch template this throw true try typedef typename union using virtual volatile while bool
  char double float int long short signed unsigned void size_t`;
const JAVA = `
  abstract async await as base boolean break byte case catch char class const continue default do double else enum
  extends false final finally float for foreach fun get goto if implements import in instanceof int interface
  internal is let long namespace new null object open out override package private protected public readonly ref
  return sealed set short static string struct super suspend switch synchronized this throw throws true try typeof
  using val var virtual void volatile when where while yield`;

/**
 * Each language: comments, strings, keywords; `plain`: names beside keywords mean nothing; `fold`: case does not
 * matter.
 */
const LANGUAGES = {
  javascript: {
    comment: SLASHES,
    string: [BACKTICK, DOUBLE, SINGLE],
    keywords: words(`
      abstract any as async await boolean break case catch class const continue debugger declare default delete
      do else enum export extends false finally for from function get if implements import in instanceof
      interface keyof let new never null number of private protected public readonly return satisfies set static
      string super switch this throw true try type typeof undefined unknown var void while with yield`),
  },
  python: {
    comment: HASH,
    string: [String.raw`[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|${END})|'''[^]*?(?:'''|${END})|${DOUBLE}|${SINGLE})`],
    keywords: words(`
      and as assert async await break case class continue def del elif else except False finally for from global
      if import in is lambda match None nonlocal not or pass raise return self True try while with yield`),
  },
  rust: {
    comment: SLASHES,
    string: [String.raw`b?r(?<hashes>#{0,9})"[^]*?(?:"\k<hashes>|${END})|b?${DOUBLE}|b?'(?:[^'\\\n]|\\[^']{1,9})'`],
    keywords: words(`
      as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i128 i16 i32
      i64 i8 if impl in isize let loop match mod move mut pub ref return self Self static str struct super trait
      true type u128 u16 u32 u64 u8 union unsafe use usize where while`),
  },
  c: { comment: `${SLASHES}|^[ \\t]*#\\w+`, string: [DOUBLE, SINGLE], keywords: words(C) },
  java: { comment: SLASHES, string: [String.raw`"""[^]*?(?:"""|${END})`, DOUBLE, SINGLE], keywords: words(JAVA) },
  go: {
    comment: SLASHES,
    string: [BACKTICK, DOUBLE, SINGLE],
    keywords: words(`
      any bool break byte case chan const continue default defer else error fallthrough false float32 float64
      for func go goto if import int int32 int64 interface iota map nil package range return rune select string
      struct switch true type uint8 uint32 uint64 var`),
  },
  swift: {
    comment: SLASHES,
    string: [String.raw`"""[^]*?(?:"""|${END})`, DOUBLE],
    keywords: words(`
      actor as async await break case catch class continue default defer do else enum extension false
      fileprivate for func guard if import in init inout internal is let mutating nil open override private
      protocol public return self Self static struct super switch throw throws true try typealias var where
      while`),
  },
  ruby: {
    comment: HASH,
    string: [DOUBLE, SINGLE, String.raw`:\w+`],
    keywords: words(`
      alias and attr_accessor begin break case class def do else elsif end ensure false for if in module next
      nil not or private require rescue return self super then true unless until when while yield`),
  },
  php: {
    comment: `${SLASHES}|${HASH}`,
    string: [DOUBLE, SINGLE],
    keywords: words(`
      abstract array as break case catch class const continue default do echo else elseif extends false final
      finally fn for foreach function if implements interface match namespace new null private protected public
      return static switch this throw trait true try use var while yield`),
  },
  bash: {
    comment: String.raw`(?<![^\s;])#[^\n]*`,
    string: [String.raw`"(?:[^"\\]|\\[^])*"?`, String.raw`'[^']*'?`],
    attribute: String.raw`\$(?:\w+|\{[^}\n]*\}?)|(?<=\s)--?[A-Za-z][\w-]*`,
    keywords: words(`
      alias break case cd continue declare do done echo elif else esac eval exec exit export fi for function if
      in local read return set shift sudo then trap unset until while`),
    plain: true,
  },
  sql: {
    comment: String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|${END})`,
    string: [SINGLE, DOUBLE],
    fold: true,
    keywords: words(`
      add all alter and as asc begin between by cascade case cast check column commit constraint create cross
      database default delete desc distinct drop else end exists false foreign from full group having if in
      index inner insert integer into is join key left like limit not null offset on or order outer over
      partition primary references right rollback select set table text then true union unique update using
      values varchar view when where with`),
  },
  lua: {
    comment: String.raw`--\[\[[^]*?(?:\]\]|${END})|--[^\n]*`,
    string: [DOUBLE, SINGLE, String.raw`\[\[[^]*?(?:\]\]|${END})`],
    keywords: words(`
      and break do else elseif end false for function goto if in local nil not or repeat return then true until
      while`),
  },
  json: {
    comment: SLASHES,
    attribute: String.raw`"(?:[^"\\\n]|\\.)*"(?=\s*:)`,
    string: [DOUBLE],
    keywords: words("true false null"),
    plain: true,
  },
  yaml: {
    comment: String.raw`(?<!\S)#[^\n]*`,
    attribute: String.raw`^[ \t]*(?:- +)*[\w."/][\w."/-]*(?=[ \t]*[:=](?:\s|$))|^\[[^\]\n]{1,200}\]`,
    string: [String.raw`"""[^]*?(?:"""|${END})`, DOUBLE, SINGLE],
    keywords: words("true false null yes no on off"),
    plain: true,
  },
  css: {
    comment: String.raw`\/\*[^]*?(?:\*\/|${END})`,
    attribute: String.raw`(?<![\w-])[a-z-]+(?=\s*:\s)`,
    string: [DOUBLE, SINGLE, String.raw`#[\da-fA-F]{3,8}\b`],
    keywords: words("important from to"),
    keyword: String.raw`@[\w-]+`,
  },
  html: {
    comment: String.raw`<!--[^]*?(?:-->|${END})`,
    type: String.raw`<[!\/?]?[A-Za-z][\w:.-]*|\/?>`,
    attribute: String.raw`(?<![\w:@.-])[\w:@.-]+(?==["'{])`,
    string: [String.raw`(?<==)(?:"[^"]*"?|'[^']*'?)`, String.raw`&#?\w+;`],
    keywords: words(""),
    plain: true,
  },
  diff: {
    added: String.raw`^\+[^\n]*`,
    removed: String.raw`^-[^\n]*`,
    keyword: String.raw`^@@[^\n]*`,
    comment: String.raw`^(?:diff|index|---|\+\+\+)[^\n]*`,
    string: [],
    keywords: words(""),
    plain: true,
  },
};

const ALIASES = {
  js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript", typescript: "javascript", mjs: "javascript",
  node: "javascript", py: "python", python3: "python", rs: "rust", "c++": "c", cpp: "c", cc: "c", h: "c", hpp: "c",
  cuda: "c", cu: "c", objc: "c", glsl: "c", zig: "c", cs: "java", csharp: "java", "c#": "java", kotlin: "java",
  kt: "java", scala: "java", dart: "java", groovy: "java", golang: "go", rb: "ruby", sh: "bash", shell: "bash",
  zsh: "bash", console: "bash", fish: "bash", dockerfile: "bash", makefile: "bash", make: "bash", powershell: "bash",
  postgresql: "sql", mysql: "sql", sqlite: "sql", jsonc: "json", json5: "json", jsonl: "json", yml: "yaml",
  toml: "yaml", ini: "yaml", properties: "yaml", scss: "css", less: "css", xml: "html", svg: "html", vue: "html",
  svelte: "html", patch: "diff",
};

const CLASSES = ["comment", "added", "removed", "attribute", "string", "type", "keyword", "number"];
const patterns = new Map();

function patternOf(name) {
  if (!patterns.has(name)) {
    const language = LANGUAGES[name];
    const sources = { ...language, string: language.string.join("|"), number: NUMBER };
    const groups = CLASSES.filter((c) => sources[c]).map((c) => `(?<${c}>${sources[c]})`);
    // A number is tried before a word, so that neither begins inside the other.
    patterns.set(name, new RegExp([...groups, `(?<word>${WORD})`].join("|"), "gm"));
  }
  return patterns.get(name);
}

/** `code` as a fragment whose parts are marked by what they are. */
export function highlight(code, language) {
  const fragment = document.createDocumentFragment();
  const name = Object.hasOwn(ALIASES, language) ? ALIASES[language] : language;
  if (!Object.hasOwn(LANGUAGES, name) || code.length > MAX_CHARS) {
    if (code) fragment.append(code);
    return fragment;
  }
  let plain = "";
  for (const [text, kind] of pieces(code, name)) {
    if (!kind) {
      plain += text;
      continue;
    }
    if (plain) fragment.append(plain);
    plain = "";
    const span = document.createElement("span");
    span.className = `hl-${kind}`;
    span.textContent = text;
    fragment.append(span);
  }
  if (plain) fragment.append(plain);
  return fragment;
}

/** Pairs of text and what it is (null: nothing special); joined they are the code. */
function* pieces(code, name) {
  const language = LANGUAGES[name];
  let at = 0;
  for (const match of code.matchAll(patternOf(name))) {
    if (match.index > at) yield [code.slice(at, match.index), null];
    at = match.index + match[0].length;
    const kind = CLASSES.find((c) => match.groups[c] !== undefined);
    yield [match[0], kind ?? wordKind(match[0], language, code[at])];
  }
  if (at < code.length) yield [code.slice(at), null];
}

function wordKind(word, language, next) {
  if (language.keywords.has(language.fold ? word.toLowerCase() : word)) return "keyword";
  if (language.plain) return null;
  if (next === "(" || next === "!") return "call";
  return /^[A-Z]\w*[a-z]/.test(word) ? "type" : null;
}
