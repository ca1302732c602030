// Conversations in this browser: IndexedDB, two stores, `conversations` and `messages`. Where there is none, memory
// does, and `kept` says so. Other tabs are told of every change.

const problems = new EventTarget();
const channel = "BroadcastChannel" in window ? new BroadcastChannel("moebius") : null;

let database = null;
/** Whether conversations outlive this page. */
export const kept = async () => {
  await opened;
  return database !== null;
};

const memory = { conversations: new Map(), messages: new Map() };

/** Opens the database; never fails. Everything below waits for it. */
const opened = open();

async function open() {
  try {
    database = await new Promise((resolve, reject) => {
      const request = indexedDB.open("moebius", 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
      request.onblocked = () => reject(new Error("blocked"));
    });
    await rescue().catch(() => keepSetting("unwritten", undefined)); // not ours, then
    // A newer page in another tab may need to change the database.
    database.onversionchange = () => database.close();
    // Asks the browser to keep the data when space runs short. The page works the same if it refuses.
    navigator.storage?.persist?.().catch(() => {});
  } catch {
    database = null;
  }
}

// A page that is left aborts writes that are on their way; what they were to write is kept for the next page.
const unwritten = new Set();
addEventListener("pagehide", () => unwritten.size && keepSetting("unwritten", [...unwritten]));
// The page came back and goes on writing.
addEventListener("pageshow", (event) => event.persisted && keepSetting("unwritten", undefined));

/** Writes what an earlier page could not. */
async function rescue() {
  const transaction = database.transaction(["conversations", "messages"], "readwrite");
  for (const { record, messages } of setting("unwritten", [])) {
    transaction.objectStore("conversations").put(record);
    for (const message of messages) transaction.objectStore("messages").put(message);
  }
  transaction.commit();
  await new Promise((resolve) => (transaction.oncomplete = transaction.onabort = resolve));
  keepSetting("unwritten", undefined);
}

/** Hears of `full` and `failed` writes. */
export const onProblem = (kind, handler) => problems.addEventListener(kind, handler);

/** Hears from other tabs: `{ changed: id }`, and what `tell` sends. */
export function onOtherTab(handler) {
  channel?.addEventListener("message", (event) => handler(event.data));
}

export function tell(message) {
  channel?.postMessage(message);
}

function wait(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Runs `work` on both stores in one transaction; resolves when it is written. */
async function write(work) {
  await opened;
  if (!database) {
    work({
      put: (store, value) => memory[store].set(value.id, structuredClone(value)),
      remove: (store, id) => memory[store].delete(id),
    });
    return;
  }
  try {
    await new Promise((resolve, reject) => {
      const transaction = database.transaction(["conversations", "messages"], "readwrite", { durability: "relaxed" });
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
      work({
        put: (store, value) => transaction.objectStore(store).put(value),
        remove: (store, id) => transaction.objectStore(store).delete(id),
      });
    });
    problems.dispatchEvent(new Event("fine"));
  } catch (error) {
    problems.dispatchEvent(new Event(error?.name === "QuotaExceededError" ? "full" : "failed"));
  }
}

/** Records of all conversations, latest first. */
export async function list() {
  await opened;
  const all = database
    ? await wait(database.transaction("conversations").objectStore("conversations").getAll())
    : [...memory.conversations.values()];
  return all.sort((a, b) => b.updated - a.updated);
}

/** `{ record, messages }` of one conversation, or null. */
export async function load(id) {
  await opened;
  if (!database) {
    const record = memory.conversations.get(id);
    return record
      ? structuredClone({ record, messages: [...memory.messages.values()].filter((m) => m.conversation === id) })
      : null;
  }
  const transaction = database.transaction(["conversations", "messages"]);
  const [record, messages] = await Promise.all([
    wait(transaction.objectStore("conversations").get(id)),
    wait(transaction.objectStore("messages").index("conversation").getAll(id)),
  ]);
  return record ? { record, messages } : null;
}

/** Writes a conversation's record and some of its messages. */
export async function save(record, messages = []) {
  const all = { record, messages };
  unwritten.add(all);
  await write(({ put }) => {
    put("conversations", record);
    for (const message of messages) put("messages", message);
  });
  unwritten.delete(all);
  tell({ changed: record.id });
}

/** Deletes conversations with their messages; returns them as `load` gives them, so that it can be undone. */
export async function remove(ids) {
  const gone = (await Promise.all(ids.map(load))).filter(Boolean);
  await write(({ remove }) => {
    for (const { record, messages } of gone) {
      remove("conversations", record.id);
      for (const message of messages) remove("messages", message.id);
    }
  });
  for (const id of ids) tell({ changed: id });
  return gone;
}

/** Ids of conversations in which `words` occur, in the title or a message. */
export async function search(words) {
  const needle = words.toLowerCase();
  const found = new Set();
  for (const record of await list()) if (record.title.toLowerCase().includes(needle)) found.add(record.id);
  const look = (message) => message.content.toLowerCase().includes(needle) && found.add(message.conversation);
  if (!database) {
    memory.messages.forEach(look);
    return found;
  }
  await new Promise((resolve, reject) => {
    const request = database.transaction("messages").objectStore("messages").openCursor();
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return resolve();
      if (!found.has(cursor.value.conversation)) look(cursor.value);
      cursor.continue();
    };
  });
  return found;
}

/** A small setting of this browser, kept as JSON. */
export function setting(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`moebius.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Keeps a setting; undefined forgets it. */
export function keepSetting(name, value) {
  try {
    if (value === undefined) localStorage.removeItem(`moebius.${name}`);
    else localStorage.setItem(`moebius.${name}`, JSON.stringify(value));
  } catch {
    // It holds until the page is closed, which is all that can be had here.
  }
}
