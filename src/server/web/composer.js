// The message field, its button, and the line under it: speed and context used.

import { byId, icon } from "./dom.js";
import { fit } from "./messages.js";

const area = byId("composer-text");
const button = byId("send");
const touch = matchMedia("(pointer: coarse)");
const count = (n) => n.toLocaleString("en");

export class Composer {
  /** `actions`: `send(text)`, which answers whether it took the text, `stop()` and `editLast()`. */
  constructor(actions) {
    this.actions = actions;
    this.busy = false;
    this.draft = null; // key under which what was typed is kept
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) actions.stop();
      else this.send();
    });
    area.addEventListener("keydown", (event) => this.key(event));
    area.addEventListener("input", () => this.changed());
    this.changed();
  }

  key(event) {
    // Enter also ends the composing of a character; on a phone it is the only way to a new line.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches) {
      event.preventDefault();
      if (!this.busy) this.send();
    } else if (event.key === "ArrowUp" && !area.value && !this.busy) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  send() {
    const typed = area.value;
    if (!typed.trim()) return;
    area.value = "";
    this.changed();
    if (this.actions.send(typed.trim())) return;
    area.value = typed;
    this.changed();
  }

  changed() {
    fit(area);
    button.disabled = !this.busy && !area.value.trim();
    if (!this.draft) return;
    try {
      if (area.value) sessionStorage.setItem(this.draft, area.value);
      else sessionStorage.removeItem(this.draft);
    } catch {
      // Then a draft is lost with the page.
    }
  }

  /** Belongs to another conversation from now on. */
  open(id) {
    // What was typed before the page knew whose it is stays.
    if (this.draft || !area.value) {
      try {
        area.value = sessionStorage.getItem(`moebius.draft.${id}`) ?? "";
      } catch {
        area.value = "";
      }
    }
    this.draft = `moebius.draft.${id}`;
    this.changed();
  }

  focus() {
    // On a phone this would open the keyboard over the conversation.
    if (!touch.matches) area.focus();
  }

  setBusy(busy) {
    if (busy === this.busy) return;
    this.busy = busy;
    button.replaceChildren(icon(busy ? "stop" : "send"));
    button.setAttribute("aria-label", busy ? "Stop" : "Send");
    button.title = busy ? "Stop (Esc)" : "Send";
    button.classList.toggle("stop", busy);
    this.changed();
  }

  /** `rate`: tokens per second or 0; `used` of `limit` tokens of context, either may be unknown. */
  meter(rate, used, limit) {
    byId("speed").textContent = rate ? `${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s` : "";
    const text =
      used && limit
        ? `${count(used)} of ${count(limit)} tokens of context`
        : limit
          ? `${count(limit)} tokens of context`
          : used
            ? `${count(used)} tokens`
            : "";
    const node = byId("context");
    node.textContent = text;
    node.classList.toggle("full", Boolean(used && limit && used > 0.9 * limit));
  }
}
