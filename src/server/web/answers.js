// Answers that are being written, in whichever conversation: asks the server, writes what comes into the message, saves
// it.

import { ApiError, chat } from "./api.js";
import * as store from "./store.js";

const SAVE_MS = 300; // what a crash of the browser may cost

const running = new Map(); // conversation id -> Answer
const unsaved = new Set(); // those and the ones whose last words are on their way to the database

/** Answers being written; dispatches `change`, `end` and `saved`, with the answer as `detail`. */
export const answers = new EventTarget();

export const answering = (id) => running.get(id);

/** The page is going away, too soon for the database: what is being written is kept where keeping takes no time. */
export function keepRunning() {
  const messages = [...unsaved].filter((answer) => !answer.dropped).map((answer) => answer.message);
  if (messages.length) store.keepSetting("running", messages);
}

/** Moves to the database what the last page kept on its way out. */
export async function restoreRunning() {
  for (const message of store.setting("running", [])) {
    const found = await store.load(message.conversation);
    const known = found?.messages.find((m) => m.id === message.id);
    if (known?.state === "live") await store.save(found.record, [message]);
  }
  store.keepSetting("running", undefined);
}

class Answer {
  constructor(conversation, message) {
    Object.assign(this, {
      conversation,
      message,
      abort: new AbortController(),
      started: performance.now(),
      first: 0,
      deltas: 0,
      timer: 0,
    });
    this.given = message.content || message.reasoning; // what a continued answer already had
  }

  stop() {
    this.abort.abort();
  }

  /** Stops, and writes nothing any more: the conversation is being deleted. */
  drop() {
    this.dropped = true;
    this.stop();
  }

  save() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.dropped) return undefined;
    return store.save(this.conversation.record, [this.message]);
  }

  /** Tokens per second so far, taking a delta for a token; 0 while it says nothing. */
  rate() {
    const seconds = (performance.now() - this.first) / 1000;
    return this.first && seconds > 0.3 ? (this.deltas - 1) / seconds : 0;
  }

  take({ content, reasoning }) {
    const now = performance.now();
    const { message } = this;
    if (!this.first) {
      this.first = now;
      message.wait = (now - this.started) / 1000;
    }
    this.deltas++;
    if (reasoning) {
      message.reasoning = (message.reasoning ?? "") + reasoning;
      message.thought = (now - this.first) / 1000;
    }
    message.content += content;
    this.timer ||= setTimeout(() => this.save(), SAVE_MS);
    this.tell("change");
  }

  finish({ finish, usage, timings, model }) {
    const { message } = this;
    message.state = finish === "length" ? "length" : "done";
    message.model = model ?? message.model;
    const seconds = (performance.now() - this.first) / 1000;
    const tokens = usage?.completion_tokens ?? this.deltas;
    message.tokens = (this.given ? (message.tokens ?? 0) : 0) + tokens;
    message.total = usage?.total_tokens ?? null;
    message.rate = timings?.predicted_per_second ?? (tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null);
  }

  tell(kind) {
    answers.dispatchEvent(new CustomEvent(kind, { detail: this }));
  }
}

/** Writes the answer `message`, the leaf of `conversation`. `more`: fields of the request. */
export async function write(conversation, message, body) {
  const answer = new Answer(conversation, message);
  Object.assign(message, { state: "live", error: null });
  running.set(conversation.id, answer);
  unsaved.add(answer);
  answer.tell("change");
  answer.save();
  try {
    answer.finish(await chat(body, answer.abort.signal, (delta) => answer.take(delta)));
  } catch (error) {
    answer.error = error;
    message.tokens ??= null;
    if (error.name === "AbortError") message.state = "stopped";
    else if (error instanceof ApiError && error.code === "lost") message.state = "lost";
    else {
      message.state = "failed";
      message.error = { message: error.message, status: error.status ?? null, code: error.code ?? null };
    }
  }
  if (message.state === "stopped" && answer.rate()) message.rate = answer.rate();
  // One that was stopped for another to begin has been replaced already.
  if (running.get(conversation.id) === answer) running.delete(conversation.id);
  answer.tell("end");
  await answer.save();
  unsaved.delete(answer);
  answer.tell("saved");
  return answer;
}

/** The request that makes the model answer after `path`. */
export function requestOf(conversation, path, model) {
  const { system, sampling } = conversation.record;
  const { thinking, ...fields } = sampling;
  const messages = [];
  for (const { role, content } of path) {
    if (role === "assistant" && !content) continue; // an answer that failed at once said nothing
    // Many chat templates want roles to alternate.
    if (messages.at(-1)?.role === role) messages.at(-1).content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  if (system.trim()) messages.unshift({ role: "system", content: system });
  const body = { messages, ...fields };
  if (model) body.model = model;
  if (thinking !== undefined) body.chat_template_kwargs = { enable_thinking: thinking, thinking };
  return body;
}
