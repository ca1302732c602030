// Markdown as DOM nodes, and `Prose`, which keeps an element in step with a text that grows.
//
// markdown-it finds out what a text means; its tokens become nodes here, and text only ever becomes text nodes. Each
// top-level block is one child of the element. Only the last block can change when text is appended, so only that one
// is rendered again, and what it had is patched rather than replaced: selections and scroll stay.

import MarkdownIt from "./vendor/markdown-it.js";
import { highlight } from "./highlight.js";
import { anchor, safe } from "./link.js";
import { mathRules, typeset } from "./math.js";

const MAX_NESTING = 30;
const TASK = /^\[([ xX])\] /;
const BREAK = /<br\s*\/?>/iy;

const markdown = new MarkdownIt({ linkify: true })
  // What models hardly ever mean: code by its indent, headings by a line below, and addresses that are elsewhere.
  .disable(["code", "lheading", "reference"])
  .use(mathRules);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.validateLink = (address) => safe(address) !== null;
markdown.normalizeLink = (address) => safe(address) ?? address;
markdown.normalizeLinkText = (address) => address;
// The one tag that models write within a table's cell.
markdown.inline.ruler.before("autolink", "br", (state, silent) => {
  BREAK.lastIndex = state.pos;
  if (!BREAK.test(state.src)) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos = BREAK.lastIndex;
  return true;
});

/** Tokens of each top-level block. `live`: the text's end is still being written. */
function blocks(text, live) {
  try {
    return parsed(text, live);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    // Nested deeper than the browser's stack: shown as it was written.
    const token = { nesting: 0, level: 0, map: [0, text.split("\n").length] };
    const words = [{ ...token, type: "text", content: text }];
    const [open, close] = [{ ...token, type: "paragraph_open", tag: "p", nesting: 1 }, { ...token, nesting: -1 }];
    return [[open, { ...token, type: "inline", children: words }, close]];
  }
}

function parsed(text, live) {
  const out = [];
  for (const token of markdown.parse(text, {})) {
    if (token.level === 0 && token.nesting >= 0) out.push([]);
    out.at(-1).push(token);
  }
  if (live && out.length) out[out.length - 1] = finished(out.at(-1));
  return out;
}

/** The tokens of a block that is being written, as what it will probably be. */
function finished(tokens) {
  const last = tokens.findLast((token) => token.nesting >= 0);
  if (last.type === "fence") {
    // Half of a closing fence is not code.
    last.content = last.content.replace(/(^|\n) *(`{1,}|~{1,})\n?$/, (all, before, mark) =>
      last.markup.startsWith(mark) ? before : all,
    );
  } else if (last.type === "inline") {
    const row = tokens[0].type === "paragraph_open" && /^(\|[^\n]*)(?:\n[|:\- ]*)?$/.exec(last.content);
    if (row) return tableHead(row[1], tokens[0].map) ?? tokens;
    const content = closed(last.content);
    if (content !== last.content) last.children = markdown.parseInline(content, {})[0].children;
  }
  return tokens;
}

/** A table whose second line is still being written. */
function tableHead(row, map) {
  const most = row.split("|").length;
  for (let columns = most; columns > Math.max(0, most - 3); columns--) {
    const tokens = markdown.parse(`${row}\n|${"-|".repeat(columns)}`, {});
    if (tokens[0].type === "table_open") return [Object.assign(tokens[0], { map }), ...tokens.slice(1)];
  }
}

/** Inline text whose last line's open marks have their partners. */
function closed(text) {
  const start = text.lastIndexOf("\n") + 1;
  // Half of a closing mark would flash as something else, and so would half of an address.
  const half = text.slice(start).replace(/[*_`~]{1,3}$/, "");
  const line = half.replace(/!?\[([^[\]]{0,1000})\]\([^()\s]{0,4000}$/, "$1");
  const odd = (parts) => parts.length % 2 === 0;
  const code = line.split("`");
  const outside = code.filter((_, i) => i % 2 === 0).join("");
  const mark = odd(code) ? (code.at(-1) ? "`" : "") : odd(outside.split("**")) && !line.endsWith("**") ? "**" : "";
  return text.slice(0, start) + line.trimEnd() + mark;
}

function element(name, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  return node;
}

/**
 * The nodes of tokens. An opening token's node takes what follows until it is closed; deeper than a reader could tell,
 * what it has stays without it.
 */
function render(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    if (token.nesting < 0) open.pop();
    else if (token.type === "inline") inline(token, open.at(-1));
    else if (token.nesting > 0 && open.length > MAX_NESTING) open.push(open.at(-1));
    else {
      const [outer, inner] = node(token);
      open.at(-1).append(outer);
      if (token.nesting > 0) open.push(inner ?? outer);
    }
  }
  return parent;
}

function inline({ children }, parent) {
  const task = parent.matches("li > p:first-child") && TASK.exec(children[0]?.content ?? "");
  if (task) {
    const box = element("input");
    Object.assign(box, { type: "checkbox", disabled: true });
    box.setAttribute("aria-label", task[1] === " " ? "to do" : "done");
    box.toggleAttribute("checked", task[1] !== " ");
    parent.parentElement.className = "task";
    parent.before(box);
    children[0].content = children[0].content.slice(task[0].length);
  }
  render(children, parent);
  parent.normalize();
}

/** What a token becomes, and where its content goes if that is another element. */
function node(token) {
  switch (token.type) {
    case "text":
    case "text_special":
      return [document.createTextNode(token.content)];
    case "softbreak":
      return ["\n"];
    case "code_inline":
      return [Object.assign(element("code"), { textContent: token.content })];
    case "math_inline":
    case "math_block":
      return [typeset(element(token.tag, "math"), token.content, token.type === "math_block")];
    case "fence":
      return [code(token)];
    case "heading_open":
      return [element(`h${Math.min(6, Number(token.tag[1]) + 2)}`)];
    case "link_open":
      return [anchor(token.attrGet("href"))];
    case "image":
      return [image(token)];
    case "ordered_list_open":
      return [numbered(token.attrGet("start"))];
    case "table_open":
      return table();
    case "th_open":
    case "td_open":
      return [cell(token)];
    default:
      return [element(token.tag)];
  }
}

function image(token) {
  const link = anchor(token.attrGet("src"));
  link.className = "image";
  link.textContent = token.content || "image";
  return link;
}

function numbered(start) {
  const list = element("ol");
  if (start !== null) list.start = start;
  return list;
}

function table() {
  const box = element("div", "table");
  box.tabIndex = 0; // wide tables scroll by keyboard too
  const inner = element("table");
  box.append(inner);
  return [box, inner];
}

function cell(token) {
  const node = element(token.tag, token.attrGet("style")?.replace("text-align:", "").replace("left", ""));
  if (token.tag === "th") node.scope = "col";
  return node;
}

function code({ info, content }) {
  const language = info.trim().split(/[\s{,]/)[0].toLowerCase();
  const figure = element("figure", "code");
  const caption = element("figcaption");
  const copy = element("button", "copy-code");
  copy.type = "button";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", "Copy code");
  caption.append(Object.assign(element("span"), { textContent: language || "text" }), copy);
  const pre = element("pre");
  pre.tabIndex = 0; // long lines scroll by keyboard too
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `${language} code` : "code");
  pre.append(highlight(element("code"), content.replace(/\n$/, ""), language));
  figure.append(caption, pre);
  return figure;
}

/**
 * Changes `old` into `fresh` with as few changes as possible; text that grew is appended to, which keeps selections.
 */
function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) {
      if (fresh.length > old.length) old.appendData(fresh.data.slice(old.length));
    } else old.data = fresh.data;
    return;
  }
  // Typeset mathematics has styles, which no attribute may bring.
  if (old.className === "math" && !old.isEqualNode(fresh)) return old.replaceWith(fresh);
  if (old.className === "math") return;
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const name of old.getAttributeNames()) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  patchChildren(old, [...fresh.childNodes], 0);
}

function patchChildren(parent, fresh, from) {
  const old = [...parent.childNodes].slice(from);
  fresh.forEach((node, i) => (i < old.length ? patch(old[i], node) : parent.append(node)));
  for (const node of old.slice(fresh.length)) node.remove();
}

/** An element that shows a Markdown text, also while it grows. */
export class Prose {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.text = "";
    this.stable = 0; // characters whose blocks are final
    this.kept = 0; // children of the root that show them
  }

  /** Shows `text`; `live`: more will follow. */
  update(text, live = false) {
    if (!text.startsWith(this.text.slice(0, this.stable))) this.reset();
    this.text = text;
    const rest = text.slice(this.stable);
    const list = blocks(rest, live);
    patchChildren(this.root, [...render(list.flat(), document.createDocumentFragment()).childNodes], this.kept);
    // A last line that is not complete may yet turn out to belong to the block before it ("2" becomes "2. ...").
    const lineOf = (block) => block[0].map[0];
    const lastLine = rest.split("\n").length - 1;
    const open = list.length > 1 && lineOf(list.at(-1)) === lastLine ? 2 : 1;
    if (!live || list.length <= open) return;
    this.stable = offsetOfLine(text, this.stable, lineOf(list.at(-open)));
    this.kept += list.length - open;
  }
}

function offsetOfLine(text, from, line) {
  while (line-- > 0) from = text.indexOf("\n", from) + 1;
  return from;
}
