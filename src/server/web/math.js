// Mathematics: where it is in a text, and KaTeX, which is fetched when the first formula is shown.

const MAX_CHARS = 4000; // a longer formula is shown as it was written
const MARKS = [["$$", "$$"], ["\\[", "\\]"], ["\\(", "\\)"], ["$", "$"]];

/** Rules for markdown-it: `$x$`, `$$x$$`, `\(x\)` and `\[x\]`, the longer two also as blocks of their own. */
export function mathRules(markdown) {
  markdown.inline.ruler.before("escape", "math_inline", inlineRule);
  markdown.block.ruler.before("fence", "math_block", blockRule, { alt: ["paragraph", "list", "blockquote"] });
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  const mark = MARKS.find(([open]) => src.startsWith(open, pos));
  if (!mark) return false;
  const start = pos + mark[0].length;
  const end = closing(state, mark[1], start);
  const text = src.slice(start, end);
  if (end < 0 || end + mark[1].length > state.posMax || !text.trim()) return false;
  if (mark[0] === "$" && (isPrice(text) || /\w/.test(src[end + 1] ?? ""))) return false;
  if (!silent) state.push("math_inline", "span", 0).content = text.trim();
  state.pos = end + mark[1].length;
  return true;
}

/** Where the mark that ends a formula is, or -1. No part of a text is searched twice for the same mark. */
function closing(state, mark, from) {
  const found = (state.cache.math ??= {});
  if (!(found[mark] >= from || found[mark] === -1)) found[mark] = state.src.indexOf(mark, from);
  return found[mark] - from > MAX_CHARS ? -1 : found[mark];
}

/** Between two dollars, but no formula. */
function isPrice(text) {
  return /^\s|\s$/.test(text) || (/^\d/.test(text) && !/^\d+[^\s\d.,]/.test(text)) || text.includes("\n\n");
}

function blockRule(state, startLine, endLine, silent) {
  const line = (i) => state.src.slice(state.bMarks[i] + state.tShift[i], state.eMarks[i]);
  const first = line(startLine);
  const mark = MARKS.slice(0, 2).find(([open]) => first.startsWith(open));
  if (!mark) return false;
  const inside = [first.slice(mark[0].length)];
  let next = startLine + 1;
  while (!inside.at(-1).includes(mark[1]) && next < endLine && state.sCount[next] >= state.blkIndent)
    inside.push(line(next++));
  const text = inside.join("\n");
  const at = text.lastIndexOf(mark[1]);
  // A formula that goes on in a sentence is not a block.
  if (at >= 0 && text.slice(at + mark[1].length).trim()) return false;
  if (silent) return true;
  const token = state.push("math_block", "div", 0);
  token.content = (at >= 0 ? text.slice(0, at) : text).trim();
  token.map = [startLine, next];
  state.line = next;
  return true;
}

let loading;

/** Fetches KaTeX, its style and so its fonts, once. */
export function load() {
  return (loading ??= import("./vendor/katex.js").then(() => {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("./vendor/katex.css", import.meta.url).href;
    document.head.append(style);
    for (const node of document.querySelectorAll(".math"))
      typeset(node, node.getAttribute("aria-label"), node.tagName === "DIV");
  }));
}

/** `node`, which shows a formula, as soon as it can: as it was written before and where it is none. */
export function typeset(node, text, block) {
  node.setAttribute("role", "math");
  node.setAttribute("aria-label", text);
  node.textContent = text;
  if (!globalThis.katex) load();
  else if (text.length <= MAX_CHARS) {
    try {
      // Not MathML, some of whose styles are attributes; a reader's voice has the label.
      const options = { displayMode: block, output: "html", strict: "ignore", maxSize: 40, maxExpand: 500 };
      globalThis.katex.render(text, node, options);
    } catch {
      node.textContent = text;
    }
  }
  return node;
}
