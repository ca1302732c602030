// A conversation: a tree of messages of which one path is shown. Editing or regenerating adds a branch; nothing is
// overwritten.
//
// conversation: { id, title, named, created, updated, system, sampling, leaf }
//   leaf    id of the last message of the shown path
// message: { id, conversation, parent, role, content, reasoning, state, ... }
//   parent  id, or null for a first message
// states of an answer: live, done, length, stopped, lost, failed

const MAX_TITLE = 60;
const ROLES = ["user", "assistant"];
const STATES = ["live", "done", "length", "stopped", "lost", "failed"];

/** A short id; `crypto.randomUUID` exists on secure origins only, and phones reach us over plain HTTP. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What a message's first line makes of a title. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line || "New conversation";
}

export class Conversation {
  /** `record` and `messages` as the store has them. */
  constructor(record, messages = []) {
    this.record = record;
    this.messages = new Map(messages.map((message) => [message.id, message]));
  }

  /** A new one with the defaults for new conversations. */
  static start({ system = "", sampling = {} } = {}) {
    const now = Date.now();
    return new Conversation({
      id: newId(),
      title: "New conversation",
      named: false,
      created: now,
      updated: now,
      system,
      sampling: { ...sampling },
      leaf: null,
    });
  }

  get id() {
    return this.record.id;
  }

  /** Messages from the first to the one with this id; the leaf, unless another is asked for. */
  path(id = this.record.leaf) {
    const out = [];
    for (let m = this.messages.get(id); m; m = this.messages.get(m.parent)) out.push(m);
    return out.reverse();
  }

  /** The alternatives at the place of `message`, oldest first. */
  siblings(message) {
    return [...this.messages.values()].filter((m) => m.parent === message.parent).sort((a, b) => a.created - b.created);
  }

  /** Adds a message under `parent` and shows it. */
  add(role, content, parent, more = {}) {
    const created = [...this.messages.values()].reduce((time, m) => Math.max(time, m.created + 1), Date.now());
    const message = { id: newId(), conversation: this.id, parent, role, content, created, ...more };
    this.messages.set(message.id, message);
    this.record.leaf = message.id;
    this.record.updated = Date.now();
    if (role === "user" && parent === null && !this.record.named) this.record.title = titleOf(content);
    return message;
  }

  /** Shows the branch through `message`, down to where it was last written. */
  show(message) {
    let leaf = message;
    for (;;) {
      const children = [...this.messages.values()].filter((m) => m.parent === leaf.id);
      if (!children.length) break;
      leaf = children.reduce((a, b) => (b.created > a.created ? b : a));
    }
    this.record.leaf = leaf.id;
  }
}

/** Checks what an imported file says about a conversation; returns `{ record, messages }` with new ids, or null. */
export function readConversation(value) {
  const text = (x, fallback = "") => (typeof x === "string" ? x : fallback);
  const time = (x) => (Number.isFinite(x) && x > 0 && x < 8e15 ? x : Date.now());
  if (!value || typeof value !== "object" || !Array.isArray(value.messages)) return null;
  const ids = new Map(value.messages.map((m) => [m?.id, newId()]));
  const { record } = Conversation.start();
  Object.assign(record, {
    title: titleOf(text(value.title)),
    named: value.named === true,
    created: time(value.created),
    updated: time(value.updated),
    system: text(value.system),
    sampling: readSampling(value.sampling),
    leaf: ids.get(value.leaf) ?? null,
  });
  const messages = [];
  for (const m of value.messages) {
    if (!m || !ROLES.includes(m.role) || typeof m.content !== "string") return null;
    const message = {
      id: ids.get(m.id),
      conversation: record.id,
      parent: ids.get(m.parent) ?? null,
      role: m.role,
      content: m.content,
      created: time(m.created),
    };
    if (m.role === "assistant") {
      message.state = STATES.includes(m.state) && m.state !== "live" ? m.state : "done";
      message.reasoning = text(m.reasoning);
      message.model = text(m.model);
      if (m.error) message.error = { message: text(m.error.message, "The server refused this") };
      for (const key of ["tokens", "total", "rate", "wait", "thought"])
        if (Number.isFinite(m[key])) message[key] = m[key];
    }
    messages.push(message);
  }
  return isForest(messages) ? { record, messages } : null;
}

/** Whether nothing is its own ancestor: everything else walks up and down without looking. */
function isForest(messages) {
  const parents = new Map(messages.map((m) => [m.id, m.parent]));
  const good = new Set([null]);
  for (const { id } of messages) {
    const walked = new Set();
    let at = id;
    for (; !good.has(at); at = parents.get(at)) {
      if (walked.has(at)) return false;
      walked.add(at);
    }
    for (const seen of walked) good.add(seen);
  }
  return true;
}

/** Fields that a request may carry, and their ranges. `step`: for the arrows of an input. */
export const SAMPLING = [
  {
    name: "temperature",
    label: "Temperature",
    least: 0,
    most: 2,
    step: 0.1,
    about: "0 always takes the likeliest token; higher is more varied",
  },
  {
    name: "top_p",
    label: "Top p",
    least: 0.01,
    most: 1,
    step: 0.05,
    about: "Keep the likeliest tokens that make up this share",
  },
  { name: "top_k", label: "Top k", least: 0, step: 1, about: "Keep this many of the likeliest tokens; 0 keeps all" },
  {
    name: "min_p",
    label: "Min p",
    least: 0,
    most: 1,
    step: 0.01,
    about: "Drop tokens below this share of the likeliest",
  },
  { name: "max_tokens", label: "Max tokens", least: 1, step: 1, about: "The longest answer" },
  { name: "seed", label: "Seed", step: 1, about: "The same seed repeats an answer" },
];

/** The valid ones among sampling settings. */
export function readSampling(value) {
  const out = {};
  for (const { name, least = -Number.MAX_SAFE_INTEGER, most = Number.MAX_SAFE_INTEGER, step } of SAMPLING) {
    const x = value?.[name];
    if (Number.isFinite(x) && x >= least && x <= most && (step !== 1 || Number.isSafeInteger(x))) out[name] = x;
  }
  if (typeof value?.thinking === "boolean") out.thinking = value.thinking;
  return out;
}
