// The page: one conversation is shown, others may be answered behind it.

import { answering, answers, keepRunning, requestOf, restoreRunning, write } from "./answers.js";
import { model as fetchModel, setApiKey } from "./api.js";
import { Composer } from "./composer.js";
import { check, connection } from "./connection.js";
import { Conversation, readConversation, titleOf } from "./conversation.js";
import { byId, el, saveFile } from "./dom.js";
import { Messages } from "./messages.js";
import { announce, banner, clearBanner, toast } from "./notices.js";
import { defaults, deviceOf, openSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";

const FORMAT = "moebius-conversations";
const ASK_TABS_MS = 200; // other tabs of this browser answer faster

let shown = Conversation.start(); // the conversation on the page; not kept before its first message
let model = null; // what the server serves
let continues = true; // until the server refuses to
let ready = false; // until then no conversation is chosen

const messages = new Messages({
  siblings: (message) => shown.siblings(message),
  canContinue: () => continues,
  show(message) {
    stop();
    shown.show(message);
    save();
    draw();
  },
  regenerate: (message) => answer(shown, message.parent),
  continue: carryOn,
  edit(message, text) {
    stop();
    const edited = shown.add("user", text, message.parent);
    answer(shown, edited.id, [edited]);
  },
  useKey(key, message) {
    setApiKey(key);
    learnModel();
    answer(shown, message.parent);
  },
});
const composer = new Composer({ send, stop, editLast: () => messages.editLast() });
const sidebar = new Sidebar({ create, rename, remove: (id) => remove([id]), save: (id) => exportAll([id]) });

const save = (changed = []) => store.save(shown.record, changed);

// Asking and answering

function send(text) {
  if (!ready) booted.then(() => composer.send());
  if (!ready || answering(shown.id)) return false;
  const message = shown.add("user", text, shown.record.leaf);
  if (location.hash.slice(1) !== shown.id) history.replaceState(null, "", `#${shown.id}`);
  composer.open(shown.id);
  answer(shown, message.id, [message]);
  return true;
}

function stop() {
  answering(shown.id)?.stop();
}

/** Has the message `parent` answered, beside answers it may have. */
async function answer(conversation, parent, unsaved = []) {
  answering(conversation.id)?.stop();
  const path = conversation.path(parent);
  const reply = conversation.add("assistant", "", parent, { reasoning: "" });
  store.save(conversation.record, [...unsaved, reply]).then(list);
  const done = write(conversation, reply, requestOf(conversation, path, model?.id));
  if (conversation === shown) draw(true);
  await done;
}

/** Has a broken-off answer continued; a server that cannot do that writes a new one. */
async function carryOn(message) {
  const conversation = shown;
  const was = message.state;
  const body = {
    ...requestOf(conversation, conversation.path(message.parent), model?.id),
    continue_final_message: true,
    add_generation_prompt: false,
  };
  body.messages.push({
    role: "assistant",
    content: message.content,
    ...(message.reasoning && { reasoning_content: message.reasoning }),
  });
  const done = write(conversation, message, body);
  draw();
  const { error, deltas } = await done;
  if (deltas || ![400, 422].includes(error?.status) || error.code === "context_length_exceeded") return;
  continues = false;
  Object.assign(message, { state: was, error: null });
  toast("This server cannot continue an answer, so it is written again.");
  store.save(conversation.record, [message]);
  answer(conversation, message.parent);
}

answers.addEventListener("change", ({ detail }) => {
  if (detail.conversation !== shown) return;
  messages.update(detail.message);
  drawStatus();
});

answers.addEventListener("saved", list);
answers.addEventListener("end", ({ detail: { conversation, message, error } }) => {
  if (error && error.name !== "AbortError" && !error.status) check();
  if (conversation !== shown) return;
  draw();
  const words = message.content.split(/\s+/).length;
  const said =
    message.state === "failed"
      ? message.error.message
      : words <= 80
        ? message.content
        : `The answer is complete, ${words} words.`;
  announce(message.state === "stopped" ? "Stopped." : said);
});

// What is shown

function draw(jump = false) {
  messages.show(shown, jump);
  byId("empty").hidden = shown.messages.size > 0;
  byId("title").textContent = shown.record.title;
  document.title = shown.messages.size ? `${shown.record.title} · Moebius` : "Moebius";
  drawStatus();
}

function drawStatus() {
  const running = answering(shown.id);
  composer.setBusy(Boolean(running));
  const last = shown.path().findLast((m) => m.total);
  composer.meter(running ? running.rate() : 0, last?.total, model?.max_model_len);
}

function drawModel() {
  const line = model ? [model.id, deviceOf(model)].filter(Boolean).join(" · ") : "Not connected";
  byId("model").textContent = line;
  byId("model").title = line;
  // The demo model knows only a few things; it would be unkind to let people guess which.
  const examples = model?.id === "demo" ? ["What is 2+2?", "Count from 1 to 5.", "What is the capital of France?"] : [];
  byId("examples").replaceChildren(
    ...examples.map((text) => el("button", { type: "button", text, onclick: () => send(text) })),
  );
  drawStatus();
}

async function list() {
  sidebar.show(await store.list(), shown.id);
}

// Which conversation

let opening = 0; // counts, so that what was opened last is shown, and not what was read last
let awaited = null; // a conversation that is not there, or not yet: another tab may be writing it

async function open(id) {
  const turn = ++opening;
  awaited = id;
  const running = answering(id);
  const found = running ? null : await store.load(id);
  if (turn !== opening) return;
  if (!running && !found) {
    if (location.hash.slice(1) === id) history.replaceState(null, "", location.pathname);
    fresh();
    awaited = id;
    return;
  }
  awaited = null;
  if (location.hash.slice(1) !== id) history.replaceState(null, "", `#${id}`);
  shown = running ? running.conversation : new Conversation(found.record, found.messages);
  composer.open(id);
  draw(true);
  list();
  composer.focus();
  if (!running) settleLive(shown);
}

function fresh() {
  opening++;
  awaited = null;
  shown = Conversation.start(defaults());
  composer.open("new");
  draw(true);
  list();
  composer.focus();
}

function create() {
  sidebar.toggle(false);
  if (location.hash.slice(1)) location.hash = "";
  else fresh();
}

const route = () => (location.hash.length > 1 ? open(location.hash.slice(1)) : fresh());

/** An answer that was being written when the page went away is broken off, unless another tab writes it. */
async function settleLive(conversation) {
  const live = [...conversation.messages.values()].filter((m) => m.state === "live");
  if (!live.length) return;
  elsewhere.delete(conversation.id);
  store.tell({ who: conversation.id });
  await new Promise((resolve) => setTimeout(resolve, ASK_TABS_MS));
  if (elsewhere.has(conversation.id) || answering(conversation.id)) return;
  // It may have ended meanwhile: what is kept is newer than what is shown.
  const kept = await store.load(conversation.id);
  const lost = kept?.messages.filter((m) => m.state === "live") ?? [];
  for (const message of lost) {
    message.state = "lost";
    Object.assign(conversation.messages.get(message.id) ?? {}, message);
  }
  if (lost.length) store.save(conversation.record, lost);
  if (conversation === shown) draw();
}

const elsewhere = new Set(); // conversations that another tab says it answers
let listing = 0;

store.onOtherTab(async ({ changed, who, mine }) => {
  if (who && answering(who)) store.tell({ mine: who });
  if (mine) elsewhere.add(mine);
  if (!changed) return;
  listing ||= setTimeout(() => {
    listing = 0;
    list();
  }, 500);
  if (changed === awaited && !shown.messages.size) return open(changed);
  if (changed !== shown.id || answering(shown.id)) return;
  const found = await store.load(changed);
  if (!found || changed !== shown.id || answering(shown.id)) return;
  shown.record = found.record;
  for (const message of found.messages) {
    const known = shown.messages.get(message.id);
    if (known) Object.assign(known, message);
    else shown.messages.set(message.id, message);
  }
  draw();
});

async function rename(id, title) {
  const found = id === shown.id ? shown : await store.load(id);
  if (!found) return;
  Object.assign(found.record, { title: titleOf(title), named: true });
  await store.save(found.record);
  if (id === shown.id) draw();
  list();
}

async function remove(ids) {
  for (const id of ids) answering(id)?.drop();
  const gone = await store.remove(ids);
  const here = ids.includes(shown.id) && shown.id;
  if (here) create();
  list();
  const undo = async () => {
    for (const { record, messages } of gone) await store.save(record, messages);
    if (here && !shown.messages.size) location.hash = here;
    list();
  };
  toast(gone.length === 1 ? `Deleted “${gone[0].record.title}”.` : `Deleted ${gone.length} conversations.`, [
    "Undo",
    undo,
  ]);
}

async function exportAll(ids) {
  const all = (await Promise.all(ids.map(store.load))).filter(Boolean);
  const conversations = all.map(({ record, messages }) => ({ ...record, messages }));
  const name =
    all.length === 1
      ? all[0].record.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)
      : new Date().toISOString().slice(0, 10);
  saveFile(`moebius-${name}.json`, JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1));
}

async function importAll(text) {
  let file = null;
  try {
    file = JSON.parse(text);
  } catch {
    // Said below.
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations))
    return toast("Not imported: this is not a file that this page exported.");
  const read = file.conversations.map(readConversation);
  const good = read.filter(Boolean);
  for (const { record, messages } of good) await store.save(record, messages);
  list();
  const bad = read.length - good.length;
  toast(`Imported ${good.length} of ${read.length} conversations${bad ? "; the rest could not be read" : ""}.`);
}

// The server

async function learnModel() {
  try {
    model = await fetchModel();
    clearBanner("key");
    clearBanner("loading");
  } catch (error) {
    model = null;
    if (error.status === 503) {
      // While a model is being loaded the server says so here.
      banner("loading", error.message);
      setTimeout(learnModel, 2000);
    } else if (error.status === 401)
      banner("key", "This server asks for an API key.", [["Enter key", () => settings("#key")]]);
    else if (!error.status) check();
  }
  drawModel();
}

connection.addEventListener("down", ({ detail }) => {
  const what = detail.status
    ? `The server does not work: ${detail.message}`
    : "No connection to the server. Trying again…";
  banner("connection", what, [["Try now", check]]);
});
connection.addEventListener("up", () => {
  if (clearBanner("connection")) toast("Connected again.");
  continues = true; // it may be another server now
  learnModel();
});

function settings(focus) {
  openSettings({ record: shown.record, model }, {
    changed: () => shown.messages.size && save(),
    key: learnModel,
    saveAll: async () => exportAll((await store.list()).map((record) => record.id)),
    load: importAll,
    removeAll: async () => remove((await store.list()).map((record) => record.id)),
  }, focus);
}

// The page as a whole

byId("open-settings").addEventListener("click", () => settings());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("composer-text").focus();
});
document.addEventListener("keydown", (event) => {
  const command = event.ctrlKey || event.metaKey;
  const typing = event.target.matches?.("input, textarea, select");
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && answering(shown.id)) stop();
  else if (command && event.key.toLowerCase() === "k") sidebar.focusSearch();
  else if (command && event.shiftKey && event.key.toLowerCase() === "o") create();
  else if (event.key === "/" && !typing && !command) byId("composer-text").focus();
  else return;
  event.preventDefault();
});
addEventListener("hashchange", route);
addEventListener("pagehide", keepRunning);

store.onProblem("full", () =>
  banner("storage", "This browser has no room left: what is new is not kept. Export conversations, then delete some.", [
    ["Settings", () => settings("#export")],
  ]),
);
store.onProblem("failed", () =>
  banner("storage", "This browser did not keep the last change. Export conversations before closing the page.", [
    ["Settings", () => settings("#export")],
  ]),
);
store.onProblem("fine", () => clearBanner("storage"));

async function boot() {
  await restoreRunning();
  await route();
  ready = true;
}

const booted = boot();
learnModel();
check();
store.kept().then((kept) => {
  if (!kept)
    banner("storage", "This browser keeps nothing for this page: conversations are gone when it is closed.", [
      ["Understood", () => clearBanner("storage")],
    ]);
});
