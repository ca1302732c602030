// Whether the server is there: asked now and then while the page is looked at, and more often while it is away.

import { health } from "./api.js";

const EVERY_MS = 20_000;
const RETRY_MS = [1000, 2000, 4000, 8000];

/** Dispatches `up` and `down` (an `ApiError` as `detail`) when that changes. */
export const connection = new EventTarget();

let up = true;
let failures = 0;
let timer = 0;
let asking = null;

function later() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(check, up ? EVERY_MS : RETRY_MS[Math.min(failures, RETRY_MS.length) - 1]);
}

/** Asks now. */
export function check() {
  asking ??= ask().finally(() => {
    asking = null;
    later();
  });
  return asking;
}

async function ask() {
  let problem = null;
  try {
    await health();
  } catch (error) {
    // A server that refuses without a key is there; so is one behind a proxy that does not know the path.
    if (![401, 403, 404].includes(error.status)) problem = error;
  }
  failures = problem ? failures + 1 : 0;
  if (Boolean(problem) !== up) return;
  up = !problem;
  connection.dispatchEvent(new CustomEvent(up ? "up" : "down", { detail: problem }));
}

document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : check()));
addEventListener("online", check);
addEventListener("offline", check);
