// The server: models, health, and a chat as a stream of deltas.

import { keepSetting, setting } from "./store.js";

/** A refusal by the server. `status` 0: it was not reached. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let key = setting("key", "");

export const apiKey = () => key;

export function setApiKey(value) {
  key = value.trim();
  keepSetting("key", key || undefined);
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached");
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  throw refusal(response.status, text);
}

function refusal(status, text) {
  try {
    const { error } = JSON.parse(text);
    if (typeof error?.message === "string") return new ApiError(status, error.message, error.code);
  } catch {
    // Something between us and the server answered in its own words.
  }
  return new ApiError(status, `The server answered with status ${status}`);
}

/** The model that is served, as `/v1/models` describes it. */
export async function model() {
  const { data } = await (await request("v1/models")).json();
  return data?.[0] ?? null;
}

/** Whether the server would answer; throws what it says otherwise. */
export async function health() {
  await request("health", { signal: AbortSignal.timeout?.(10_000) });
}

/**
 * Asks for an answer. `onDelta` hears `{ content, reasoning }` pieces. Returns `{ finish, usage, timings, model }`.
 *
 * Throws `ApiError`; its `code` is "lost" when the stream broke off.
 */
export async function chat(body, signal, onDelta) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const end = { finish: null, usage: null, timings: null, model: null };
  let done = false;
  const take = (data) => {
    if (data === "[DONE]") return void (done = true);
    const chunk = JSON.parse(data);
    if (chunk.error)
      throw new ApiError(200, chunk.error.message ?? "The server failed within the answer", chunk.error.code);
    end.usage = chunk.usage ?? end.usage;
    end.timings = chunk.timings ?? end.timings;
    end.model = chunk.model ?? end.model;
    const choice = chunk.choices?.[0];
    end.finish = choice?.finish_reason ?? end.finish;
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (content || reasoning) onDelta({ content: content || "", reasoning: reasoning || "" });
  };
  try {
    for await (const data of events(response.body)) take(data);
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    if (error instanceof SyntaxError) throw new ApiError(200, "The server sent something that is not a chat stream");
    throw new ApiError(0, "The connection was lost", "lost");
  }
  if (!done && !end.finish) throw new ApiError(0, "The connection was lost", "lost");
  return end;
}

/** The payloads of a stream of server-sent events. */
async function* events(body) {
  // Not through a TextDecoderStream: when the connection breaks, that one drops what it holds.
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
