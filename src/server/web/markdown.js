// Markdown as DOM nodes, and `Prose`, which keeps an element in step with a text that grows.
//
// Blocks are told apart line by line; each top-level block is one child of the element. Only the last block can change
// when text is appended, so only that one is rendered again, and what it had is patched rather than replaced:
// selections and scroll stay.

import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const MAX_NESTING = 12;
// No pattern has two neighbours that match the same characters: a hostile line costs no more than its length.
const FENCE = /^\s*(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const MATH = /^\s*(\$\$|\\\[)/;
const ALIGNMENT = /^\|?\s*:?-+:?(?:\s*\|\s*:?-+:?)*\s*\|?$/;
const TASK = /^\[([ xX])\] /;

/** Blocks of `lines`, each with the index of its first line. */
export function blocks(lines, depth = 0) {
  const out = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [block, next] = readBlock(lines, i, depth);
    out.push({ ...block, line: i });
    i = next;
  }
  return out;
}

/** One block and the index of the line after it. */
function readBlock(lines, i, depth) {
  const line = lines[i];
  let m;
  if ((m = FENCE.exec(line))) return readFence(lines, i, m);
  if ((m = HEADING.exec(line)))
    return [{ type: "heading", level: m[1].length, text: (m[2] ?? "").trim().replace(/(?:^|\s)#+$/, "") }, i + 1];
  if (RULE.test(line)) return [{ type: "rule" }, i + 1];
  if ((m = MATH.exec(line))) return readMath(lines, i, m[1]);
  if (depth < MAX_NESTING) {
    if (QUOTE.test(line)) return readQuote(lines, i, depth);
    if ((m = ITEM.exec(line))) return readList(lines, i, m, depth);
  }
  if (isTable(lines, i)) return readTable(lines, i);
  let end = i + 1;
  while (end < lines.length && !interrupts(lines, end, depth)) end++;
  return [{ type: "paragraph", text: lines.slice(i, end).map((l) => l.trimStart()).join("\n") }, end];
}

/** Whether the line ends a paragraph above it. */
function interrupts(lines, i, depth) {
  const line = lines[i];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || MATH.test(line)) return true;
  if (depth < MAX_NESTING && (QUOTE.test(line) || /^ *(?:[-*+]|1[.)]) +\S/.test(line))) return true;
  return isTable(lines, i);
}

function readFence(lines, i, [line, mark, info]) {
  const indent = line.length - line.trimStart().length;
  const closing = (l) => {
    const t = l.trim();
    return t.length >= mark.length && t === mark[0].repeat(t.length);
  };
  let end = i + 1;
  while (end < lines.length && !closing(lines[end])) end++;
  const inside = lines.slice(i + 1, end).map((l) => strip(l, indent));
  // Half of a closing fence is not code.
  if (end === lines.length && inside.length && mark.startsWith(inside.at(-1).trim() || " ")) inside.pop();
  return [{ type: "code", language: info.trim().split(/[\s{,]/)[0].toLowerCase(), text: inside.join("\n") }, end + 1];
}

function readMath(lines, i, mark) {
  const close = mark === "$$" ? "$$" : "\\]";
  const inside = [lines[i].trim().slice(mark.length)];
  let end = i + 1;
  while (!inside.at(-1).includes(close) && end < lines.length) inside.push(lines[end++]);
  const text = inside.join("\n");
  const at = text.lastIndexOf(close);
  // Math that goes on in a sentence is not a block.
  if (at >= 0 && text.slice(at + close.length).trim())
    return [{ type: "paragraph", text: lines.slice(i, end).join("\n") }, end];
  return [{ type: "math", text: (at >= 0 ? text.slice(0, at) : text).trim() }, end];
}

function readQuote(lines, i, depth) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return [{ type: "quote", blocks: blocks(lines.slice(i, end).map((l) => l.replace(QUOTE, "")), depth + 1) }, end];
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function strip(line, indent) {
  return line.slice(Math.min(indent, indentOf(line)));
}

/** A list, forgiving about how far nested items are indented: models are. */
function readList(lines, i, first, depth) {
  const base = first[1].length;
  const kind = (marker) => marker.at(-1);
  const items = [];
  let item = null;
  let blank = false;
  for (; i < lines.length; i++) {
    const line = lines[i];
    if (!line.trim()) {
      blank = true;
      item.push("");
      continue;
    }
    const indent = indentOf(line);
    const m = ITEM.exec(line);
    if (m && indent < base + 2 && !RULE.test(line)) {
      if (indent < base || kind(m[2]) !== kind(first[2])) break;
      item = [line.slice(m[0].length)];
      item.indent = m[0].length - indent > 5 ? m[2].length + 1 + indent : m[0].length;
      items.push(item);
    } else if (indent >= Math.min(item.indent, base + 2)) {
      item.push(strip(line, item.indent));
    } else if (blank || interrupts(lines, i, depth)) {
      break;
    } else {
      item.push(line);
    }
    blank = false;
  }
  const start = parseInt(first[2], 10);
  return [
    { type: "list", start: Number.isNaN(start) ? null : start, items: items.map((item) => readItem(item, depth)) },
    i,
  ];
}

function readItem(lines, depth) {
  const task = TASK.exec(lines[0]);
  if (task) lines[0] = lines[0].slice(task[0].length);
  return { done: task ? task[1] !== " " : null, blocks: blocks(lines, depth + 1) };
}

function isTable(lines, i) {
  if (!lines[i].includes("|") || i + 1 >= lines.length || !ALIGNMENT.test(lines[i + 1].trim())) return false;
  return cells(lines[i]).length === cells(lines[i + 1]).length;
}

function readTable(lines, i) {
  const align = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : null));
  let end = i + 2;
  while (
    end < lines.length &&
    lines[end].trim() &&
    !(FENCE.test(lines[end]) || HEADING.test(lines[end]) || QUOTE.test(lines[end]))
  )
    end++;
  return [{ type: "table", align, rows: [lines[i], ...lines.slice(i + 2, end)].map(cells) }, end];
}

/** Cells of a row: cut at bars that are neither escaped nor in code. */
function cells(line) {
  const text = line.trim().replace(/^\|/, "");
  const out = [];
  let cell = "";
  let code = false;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") cell += text[++i];
    else if (text[i] === "|" && !code) {
      out.push(cell.trim());
      cell = "";
    } else {
      if (text[i] === "`") code = !code && text.indexOf("`", i + 1) > 0;
      cell += text[i];
    }
  }
  if (cell.trim() || !text.endsWith("|")) out.push(cell.trim());
  return out;
}

function element(name, className) {
  const node = document.createElement(name);
  if (className) node.className = className;
  return node;
}

/** The element of a block. `live`: its text is still growing. */
function render(block, live) {
  switch (block.type) {
    case "heading":
      return words(element(`h${Math.min(6, block.level + 2)}`), block.text, live);
    case "rule":
      return element("hr");
    case "code":
      return renderCode(block);
    case "math":
      return Object.assign(element("div", "math"), { textContent: block.text });
    case "quote":
      return children(element("blockquote"), block.blocks, live);
    case "list":
      return renderList(block, live);
    case "table":
      return renderTable(block, live);
    default:
      return live && /^\|[^\n]*(?:\n[|:\- ]*)?$/.test(block.text)
        ? renderHead(block.text)
        : words(element("p"), block.text.trimEnd(), live);
  }
}

/** A table whose second line is still being written. */
function renderHead(text) {
  const row = cells(text.split("\n")[0]);
  return renderTable({ align: row.map(() => null), rows: [row] }, false);
}

function words(node, text, live) {
  inline(node, text, live);
  return node;
}

function children(node, list, live) {
  list.forEach((block, i) => node.append(render(block, live && i === list.length - 1)));
  return node;
}

function renderCode({ language, text }) {
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
  const code = element("code");
  code.append(highlight(text, language));
  pre.append(code);
  figure.append(caption, pre);
  return figure;
}

function renderList({ start, items }, live) {
  const list = element(start === null ? "ul" : "ol");
  if (start !== null && start !== 1) list.start = start;
  items.forEach((item, i) => {
    const li = element("li");
    if (item.done !== null) {
      li.className = "task";
      const box = element("input");
      Object.assign(box, { type: "checkbox", disabled: true });
      box.setAttribute("aria-label", item.done ? "done" : "to do");
      box.toggleAttribute("checked", item.done);
      li.append(box);
    }
    list.append(children(li, item.blocks, live && i === items.length - 1));
  });
  return list;
}

function renderTable({ align, rows }, live) {
  const box = element("div", "table");
  const table = element("table");
  const head = element("thead");
  const body = element("tbody");
  rows.forEach((row, r) => {
    const tr = element("tr");
    row.slice(0, align.length).forEach((text, c) => {
      const cell = element(r ? "td" : "th", align[c]);
      if (!r) cell.scope = "col";
      tr.append(words(cell, text, live && r === rows.length - 1));
    });
    (r ? body : head).append(tr);
  });
  table.append(head);
  if (body.hasChildNodes()) table.append(body);
  box.append(table);
  box.tabIndex = 0; // wide tables scroll by keyboard too
  return box;
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
    const lines = text.slice(this.stable).split("\n").map((line) => line.replace(/\r$/, "").replaceAll("\t", "    "));
    const list = blocks(lines);
    patchChildren(this.root, list.map((block, i) => render(block, live && i === list.length - 1)), this.kept);
    // A last line that is not complete may yet turn out to belong to the block before it ("2" becomes "2. ...").
    const open = list.length > 1 && list.at(-1).line === lines.length - 1 ? 2 : 1;
    if (!live || list.length <= open) return;
    const first = list[list.length - open].line;
    this.stable = offsetOfLine(text, this.stable, first);
    this.kept += list.length - open;
  }
}

function offsetOfLine(text, from, line) {
  while (line-- > 0) from = text.indexOf("\n", from) + 1;
  return from;
}
