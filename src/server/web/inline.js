// Inline Markdown as DOM nodes: code, emphasis, links, math. Text only ever becomes text nodes.
//
// Delimiters of emphasis are first written as text nodes; when a closer finds its opener, what lies between them moves
// into an element (the way CommonMark's reference describes it). Work is linear in the text, and nesting is bounded:
// what would go deeper stays text, and so does all that begins outside of it, so that nothing is walked over again and
// again.

import { anchor, safe } from "./link.js";

const MAX_NESTING = 16;
const SPECIAL = /[\\`*_~$[\]!<&\n]|https?:\/\//gi;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  hellip: "…",
  mdash: "—",
  ndash: "–",
  times: "×",
};
// `(?!\s)`: blanks belong to one place only, so that a failure costs no more than their number.
const ADDRESS = String.raw`<([^<>\n]{0,4000})>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.){0,1000}\)){0,4000})`;
const TITLE = String.raw`"[^"]{0,1000}"|'[^']{0,1000}'`;
const TARGET = new RegExp(String.raw`\(\s*(?!\s)(?:${ADDRESS})(?:\s+(?:${TITLE}))?\s*\)`, "y");

/**
 * Appends `text` to `parent`. `live`: more may follow, so what is still open at the end is shown as if it were
 * closed.
 */
export function inline(parent, text, live = false) {
  // Half of a closing mark would flash as something else.
  new Inline(parent, live ? text.replace(/[*_`~]{1,3}$/, "") : text, live).run();
}

class Inline {
  constructor(parent, text, live) {
    Object.assign(this, { parent, text, live, at: 0, plain: "" });
    this.delimiters = []; // { node, char, count, opens, closes }
    this.brackets = []; // { node, image, from: index into delimiters }
    this.linked = 0; // brackets below this index have a link in them, so that they cannot become one
    this.missing = new Set(); // marks that nothing closes, so that each is looked for once
  }

  run() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text)?.index ?? text.length;
      this.plain += text.slice(this.at, found);
      this.at = found;
      if (found === text.length) break;
      if (!this.special(text[found])) this.plain += text[this.at++];
    }
    this.flush();
    if (this.live) this.closeLast();
    this.emphasize(0);
  }

  /** Takes what begins with a special character; false when it is only itself. */
  special(char) {
    switch (char) {
      case "\\": return this.escape();
      case "`": return this.code();
      case "$": return this.dollar();
      case "*": case "_": case "~": return this.delimiter(char);
      case "[": return this.open(false);
      case "!": return this.text[this.at + 1] === "[" && this.open(true);
      case "]": return this.close();
      case "<": return this.angle();
      case "&": return this.entity();
      case "\n": return this.newline();
      default: return this.bare();
    }
  }

  flush() {
    if (this.plain) this.parent.append(this.plain);
    this.plain = "";
  }

  push(node, end) {
    this.flush();
    this.parent.append(node);
    this.at = end;
    return true;
  }

  element(name, text, end, className) {
    const node = document.createElement(name);
    node.textContent = text;
    if (className) node.className = className;
    return this.push(node, end);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(" || next === "[") {
      const mark = next === "(" ? "\\)" : "\\]";
      const end = this.missing.has(mark) ? -1 : this.text.indexOf(mark, this.at + 2);
      if (end < 0) this.missing.add(mark);
      else return this.element("span", this.text.slice(this.at + 2, end).trim(), end + 2, "math");
    }
    if (next === "\n") return this.element("br", "", this.at + 2);
    if (!next || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  /** The index of the next run of exactly `length` backticks at or after `from`, or -1. */
  backticks(length, from) {
    this.lastRun ??= new Map(Array.from(this.text.matchAll(/`+/g), (run) => [run[0].length, run.index]));
    if (!(this.lastRun.get(length) >= from)) return -1; // no search through all of the text in vain
    let i = this.text.indexOf("`", from);
    for (let n; (n = this.runLength("`", i)) !== length; ) i = this.text.indexOf("`", i + n);
    return i;
  }

  runLength(char, from) {
    let n = 0;
    while (this.text[from + n] === char) n++;
    return n;
  }

  code() {
    const n = this.runLength("`", this.at);
    const start = this.at + n;
    const end = this.backticks(n, start);
    if (end < 0) {
      if (this.live && n === 1 && start < this.text.length)
        return this.element("code", this.text.slice(start), this.text.length);
      this.plain += "`".repeat(n);
      this.at = start;
      return true;
    }
    const inside = this.text.slice(start, end).replaceAll("\n", " ");
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && /[^ ]/.test(inside);
    return this.element("code", padded ? inside.slice(1, -1) : inside, end + n);
  }

  /** `$x$` and `$$x$$`; a price is not math. */
  dollar() {
    const mark = this.text.startsWith("$$", this.at) ? "$$" : "$";
    const n = mark.length;
    const start = this.at + n;
    if (this.missing.has(mark) || (n === 1 && !/[^\s\d$]|\d+[^\s\d.,]/y.test(this.text.slice(start, start + 8))))
      return false;
    const end = this.text.indexOf(mark, start);
    if (end < 0) this.missing.add(mark);
    if (end <= start || end - start > 2000) return false;
    if (n === 1 && (/\s/.test(this.text[end - 1]) || /\w/.test(this.text[end + 1] ?? ""))) return false;
    return this.element("span", this.text.slice(start, end).trim(), end + n, "math");
  }

  delimiter(char) {
    const count = this.runLength(char, this.at);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + count] ?? " ";
    const space = [/\s/.test(before), /\s/.test(after)];
    const punctuation = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !space[1] && (!punctuation[1] || space[0] || punctuation[0]);
    const right = !space[0] && (!punctuation[0] || space[1] || punctuation[1]);
    const opens = char === "_" ? left && (!right || punctuation[0]) : left;
    const closes = char === "_" ? right && (!left || punctuation[1]) : right;
    const node = document.createTextNode(char.repeat(count));
    if ((opens || closes) && (char !== "~" || count === 2))
      this.delimiters.push({ node, char, count, length: count, opens, closes });
    return this.push(node, this.at + count);
  }

  open(image) {
    const mark = image ? "![" : "[";
    const node = document.createTextNode(mark);
    this.brackets.push({ node, image, from: this.delimiters.length });
    return this.push(node, this.at + mark.length);
  }

  close() {
    const bracket = this.brackets.pop();
    const { length } = this.brackets;
    const linked = length < this.linked;
    this.linked = Math.min(this.linked, length);
    if (!bracket || (linked && !bracket.image)) return false; // no link within a link
    TARGET.lastIndex = this.at + 1;
    const target = TARGET.exec(this.text);
    if (!target) {
      // A link whose address is still being written shows its words only.
      const rest = this.text.slice(this.at + 1);
      if (!this.live || !/^\([^\s()]*$/.test(rest)) return false;
      this.flush();
      bracket.node.remove();
      this.at = this.text.length;
      return true;
    }
    const address = safe((target[1] ?? target[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"));
    if (!address && !bracket.image) return false;
    this.flush();
    this.emphasize(bracket.from);
    const a = address ? anchor(address) : document.createElement("span");
    if (bracket.image) a.className = "image";
    if (!wrap(bracket.node, null, a)) {
      this.brackets.length = this.linked = 0;
      return false;
    }
    if (!a.hasChildNodes()) a.append(bracket.image ? "image" : address);
    bracket.node.remove();
    if (!bracket.image) this.linked = length;
    this.at = TARGET.lastIndex;
    return true;
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + 2000);
    const br = /^<br\s*\/?>/i.exec(rest);
    if (br) return this.element("br", "", this.at + br[0].length);
    const link = /^<([a-z][a-z+.-]*:[^\s<>]+|[^\s<>@]+@[^\s<>@]+)>/i.exec(rest);
    const address = link && safe(link[1].includes(":") ? link[1] : `mailto:${link[1]}`);
    return Boolean(address) && this.link(address, link[1], this.at + link[0].length);
  }

  bare() {
    const rest = this.text.slice(this.at, this.at + 4000);
    // A host that is none makes no address, however long it goes on: a text full of them is read once.
    const host = /^https?:\/\/[^\s<>`*"/#]+(?=[/#])/i.exec(rest);
    if (host && !safe(host[0])) return false;
    let words = /^[^\s<>`*"]*/.exec(rest)[0];
    while (".,:;!?'_~".includes(words.at(-1))) words = words.slice(0, -1);
    // A closing bracket belongs to the sentence unless the address opened it.
    let open = words.split("(").length - words.split(")").length;
    while (words.endsWith("]") || (words.endsWith(")") && open < 0)) {
      if (words.endsWith(")")) open++;
      words = words.slice(0, -1);
    }
    const address = safe(words);
    return Boolean(address) && this.link(address, words, this.at + words.length);
  }

  link(address, words, end) {
    const a = anchor(address);
    a.textContent = words;
    return this.push(a, end);
  }

  entity() {
    const found = /^&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/i.exec(this.text.slice(this.at, this.at + 12));
    if (!found) return false;
    const code = found[1] ? Number(found[1]) : parseInt(found[2], 16);
    const char = found[3] ? ENTITIES[found[3]] : code > 31 && code <= 0x10ffff ? String.fromCodePoint(code) : null;
    if (!char) return false;
    this.plain += char;
    this.at += found[0].length;
    return true;
  }

  newline() {
    const hard = this.plain.endsWith("  ");
    this.plain = this.plain.trimEnd();
    if (hard) return this.element("br", "", this.at + 1);
    this.flush(); // so that no line is trimmed twice
    return false;
  }

  /** A `**` that is still waiting for its partner gets it. */
  closeLast() {
    let open = null;
    for (const d of this.delimiters)
      if (d.char === "*" && d.length === 2) open = open && d.closes ? null : d.opens ? d : open;
    if (!open?.node.nextSibling) return;
    const node = document.createTextNode("**");
    this.parent.append(node);
    this.delimiters.push({ node, char: "*", count: 2, length: 2, opens: false, closes: true });
  }

  /** Turns pairs of delimiters from index `from` on into elements. */
  emphasize(from) {
    const list = this.delimiters.splice(from);
    const bottom = new Map(); // kind of closer -> index below which no opener can match
    const stack = []; // indices of delimiters that may still open
    for (let i = 0; i < list.length; i++) {
      const closer = list[i];
      while (closer.closes && closer.count > 0) {
        const key = `${closer.char}${closer.opens}${closer.length % 3}`;
        let at = stack.length - 1;
        while (at >= 0 && stack[at] >= (bottom.get(key) ?? 0) && !matches(list[stack[at]], closer)) at--;
        if (at < 0 || stack[at] < (bottom.get(key) ?? 0)) {
          bottom.set(key, i);
          break;
        }
        const opener = list[stack[at]];
        const n = Math.min(2, opener.count, closer.count);
        if (
          !wrap(
            opener.node,
            closer.node,
            document.createElement(closer.char === "~" ? "del" : n === 2 ? "strong" : "em"),
          )
        ) {
          stack.length = 0;
          break;
        }
        stack.length = at + 1;
        for (const d of [opener, closer]) {
          d.count -= n;
          d.node.data = d.char.repeat(d.count);
          if (d.count === 0) d.node.remove();
        }
        if (opener.count === 0) stack.pop();
      }
      if (closer.opens && closer.count > 0) stack.push(i);
    }
  }
}

function matches(opener, closer) {
  if (opener.char !== closer.char) return false;
  const both = opener.closes || closer.opens;
  return !(both && (opener.length + closer.length) % 3 === 0 && (opener.length % 3 || closer.length % 3));
}

const depths = new WeakMap();

/**
 * Moves what lies between two siblings (to the last, if `end` is null) into `node`, which follows `start`; false if
 * too deep.
 */
function wrap(start, end, node) {
  let depth = 0;
  for (let inner = start.nextSibling; inner !== end; inner = inner.nextSibling)
    depth = Math.max(depth, depths.get(inner) ?? 0);
  if (depth >= MAX_NESTING) return false;
  while (start.nextSibling !== end) node.append(start.nextSibling);
  depths.set(node, depth + 1);
  start.after(node);
  return true;
}
