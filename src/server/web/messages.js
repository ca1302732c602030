// The messages of the shown conversation. Each keeps its element for as long as it is shown; an answer that grows is
// drawn at most once a frame, and less often when drawing takes long.

import { answering } from "./answers.js";
import { byId, copyText, el, icon, iconButton } from "./dom.js";
import { Prose } from "./markdown.js";
import { toast } from "./notices.js";

const NEAR_END = 40; // pixels from the end within which we follow

const scroller = byId("scroller");
const list = byId("messages");
const latest = byId("latest");

/** How long a person needs to read it: `1.5 s`, `2 min 5 s`. */
const duration = (s) =>
  s < 10 ? `${s.toFixed(1)} s` : s < 60 ? `${Math.round(s)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;

/** Keeps the end in sight until the reader scrolls up. */
const follow = {
  on: true,
  top: 0,
  gap: () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight,
  toEnd() {
    this.on = true;
    scroller.scrollTop = scroller.scrollHeight;
    this.note();
  },
  /** After the window changed. */
  keep() {
    if (this.on) scroller.scrollTop = scroller.scrollHeight;
    this.note();
  },
  /** Does `work`, after which the messages may be taller. */
  during(work) {
    this.look();
    work();
    this.keep();
  },
  note() {
    this.top = scroller.scrollTop;
    latest.hidden = this.on || this.gap() < NEAR_END;
  },
  /**
   * Where the reader went. Asked before every change too: the event that tells of scrolling comes only with the
   * next frame.
   */
  look() {
    const moved = scroller.scrollTop - this.top;
    if (moved < -2 && this.gap() > 2) this.on = false;
    else if (moved !== 0 && this.gap() < NEAR_END) this.on = true;
  },
  scrolled() {
    this.look();
    this.note();
  },
};
scroller.addEventListener("scroll", () => follow.scrolled(), { passive: true });
latest.addEventListener("click", () => follow.toEnd());
new ResizeObserver(() => follow.keep()).observe(scroller);

class View {
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    const user = message.role === "user";
    this.body = el("div", { class: "body" });
    this.foot = el("footer", { class: "foot" });
    this.node = el("article", { class: `message ${message.role}`, role: "listitem", "data-id": message.id },
      el("h2", { class: "offscreen", text: user ? "You" : "Answer" }), this.body, this.foot);
    if (user) {
      this.body.append(el("div", { class: "bubble", text: message.content }));
    } else {
      this.thinking = null;
      this.prose = new Prose(el("div", { class: "prose" }));
      this.note = el("div", { class: "note" });
      this.body.append(this.prose.root, this.note);
    }
    this.update();
  }

  /** Draws the message as it is now. */
  update() {
    const live = this.message.state === "live";
    if (this.prose) {
      this.node.classList.toggle("live", live);
      this.node.setAttribute("aria-busy", live);
      if (this.message.reasoning) this.drawThinking(live);
      this.prose.update(this.message.content, live);
      if (!live || this.state !== "live") this.drawNote();
      if (live && (this.message.content || this.message.reasoning)) this.note.replaceChildren();
    }
    if (!live || this.state !== "live") this.drawFoot();
    this.state = this.message.state;
  }

  drawThinking(live) {
    const { message } = this;
    if (!this.thinking) {
      this.thoughts = new Prose(el("div", { class: "prose" }));
      this.thinking = el(
        "details",
        { class: "thinking", ontoggle: () => this.drawThinking(message.state === "live") },
        el("summary"),
        this.thoughts.root,
      );
      this.body.prepend(this.thinking);
    }
    const busy = live && !message.content;
    this.thinking.classList.toggle("busy", busy);
    const took = message.thought ? ` for ${duration(message.thought)}` : "";
    const words = busy ? `Thinking${took}` : `Thought${took}`;
    if (this.thinking.firstChild.textContent !== words) this.thinking.firstChild.textContent = words;
    if (this.thinking.open) this.thoughts.update(message.reasoning, busy);
  }

  drawNote() {
    const { message, actions } = this;
    this.note.replaceChildren();
    this.note.classList.toggle("failed", message.state === "failed");
    const button = (label, name, act) =>
      el("button", { type: "button", class: "plain", onclick: () => act(message) }, icon(name), label);
    const goOn = () =>
      (message.content || message.reasoning) && actions.canContinue()
        ? button("Continue", "play", actions.continue)
        : button("Write again", "again", actions.regenerate);
    switch (message.state) {
      case "live":
        this.note.append(
          el(
            "span",
            { class: "waiting", role: "img", "aria-label": "Waiting for the first words" },
            el("i"),
            el("i"),
            el("i"),
          ),
        );
        break;
      case "stopped":
        this.note.append(el("span", { text: "Stopped." }), goOn());
        break;
      case "lost":
        this.note.append(el("span", { text: "The answer was interrupted." }), goOn());
        break;
      case "length":
        this.note.append(el("span", { text: "The answer reached its longest length." }), goOn());
        break;
      case "failed":
        this.note.append(
          el(
            "div",
            { role: "alert" },
            el("strong", { text: advice(message.error) }),
            el("span", { text: message.error.message }),
          ),
        );
        if (message.error.status === 401) this.note.append(keyForm((key) => actions.useKey(key, message)));
        else this.note.append(button("Try again", "again", actions.regenerate));
        break;
      default:
        if (!message.content && !message.reasoning)
          this.note.append(
            el("span", { text: "The model said nothing." }),
            button("Write again", "again", actions.regenerate),
          );
    }
  }

  drawFoot() {
    const { message, actions, foot } = this;
    // A button that has the keyboard's focus keeps it.
    const focused = foot.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    foot.replaceChildren();
    if (message.state === "live") return;
    const siblings = actions.siblings(message);
    if (siblings.length > 1) {
      const at = siblings.indexOf(message);
      const go = (step) => () => actions.show(siblings[at + step]);
      foot.append(el("span", { class: "branches" },
        iconButton("left", "Earlier version", go(-1), { disabled: at === 0 }),
        el("span", { text: `${at + 1}/${siblings.length}`, "aria-label": `Version ${at + 1} of ${siblings.length}` }),
        iconButton("right", "Later version", go(1), { disabled: at === siblings.length - 1 })));
    }
    const copy = iconButton("copy", "Copy", () => copied(copy, message.content));
    foot.append(copy);
    if (message.role === "user") foot.append(iconButton("edit", "Edit", () => this.edit()));
    else
      foot.append(
        iconButton("again", "Regenerate", () => actions.regenerate(message)),
        el("span", { class: "quiet stats", text: stats(message) }),
      );
    if (focused) foot.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  /** Lets the user rewrite the message; sending makes a new branch. */
  edit() {
    const { message, actions } = this;
    const area = el("textarea", { "aria-label": "Edit your message", rows: 1 });
    area.value = message.content;
    const close = () => {
      form.replaceWith(this.body.bubble);
      this.node.classList.remove("editing");
      this.foot.querySelector('[aria-label="Edit"]')?.focus();
    };
    const send = (event) => {
      event?.preventDefault();
      if (!area.value.trim()) return;
      close();
      actions.edit(message, area.value.trim());
    };
    const form = el(
      "form",
      { class: "edit", onsubmit: send },
      area,
      el(
        "div",
        { class: "row" },
        el("button", { type: "button", class: "plain", text: "Cancel", onclick: close }),
        el("button", { type: "submit", class: "primary", text: "Send" }),
      ),
    );
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (
        event.key === "Enter" &&
        !event.shiftKey &&
        !event.isComposing &&
        !matchMedia("(pointer: coarse)").matches
      )
        send(event);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.bubble = this.body.firstChild;
    this.body.bubble.replaceWith(form);
    this.node.classList.add("editing");
    fit(area);
    area.addEventListener("input", () => fit(area));
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** Grows a text field with its text, where CSS alone cannot. */
export function fit(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

async function copied(button, text) {
  try {
    await copyText(text);
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  } catch (error) {
    toast(`Not copied: ${error.message}`);
  }
}

list.addEventListener("click", async ({ target }) => {
  if (!target.matches?.(".copy-code")) return;
  try {
    await copyText(target.closest("figure").querySelector("code").textContent);
    target.textContent = "Copied";
    setTimeout(() => (target.textContent = "Copy"), 1500);
  } catch (error) {
    toast(`Not copied: ${error.message}`);
  }
});

function stats({ rate, tokens, wait }) {
  const parts = [];
  if (rate) parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  if (tokens) parts.push(`${tokens.toLocaleString("en")} tokens`);
  if (wait >= 0.1) parts.push(`first after ${duration(wait)}`);
  return parts.join(" · ");
}

/** What can be done about a refusal, before the server's own words. */
function advice({ status, code }) {
  if (code === "context_length_exceeded")
    return "This conversation no longer fits the model's context: start a new one, or shorten a message. ";
  if (status === 0) return "The server does not answer: check that it runs. ";
  if (status === 401 || status === 403) return "This server asks for an API key. ";
  if (status === 404) return "The server does not have this model any more: reload the page. ";
  if (status === 413) return "This is more than the server takes at once: shorten it. ";
  if (status === 429) return "The server is busy: try again in a while. ";
  if (status === 400 || status === 422) return "The server did not accept this request: look at the settings. ";
  return "The server could not answer. ";
}

function keyForm(use) {
  const input = el("input", {
    class: "secret",
    "aria-label": "API key",
    placeholder: "API key",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
  });
  const submit = (event) => {
    event.preventDefault();
    use(input.value);
  };
  return el(
    "form",
    { class: "key", onsubmit: submit },
    input,
    el("button", { type: "submit", class: "primary", text: "Use" }),
    el("span", { class: "quiet", text: "It stays in this browser." }),
  );
}

/** Where `work` removes the button that has the focus, the focus goes to the message field, not to the page's top. */
function keepingFocus(work) {
  const inside = list.contains(document.activeElement);
  work();
  if (inside && !list.contains(document.activeElement) && !matchMedia("(pointer: coarse)").matches)
    byId("composer-text").focus();
}

export class Messages {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map();
    this.due = 0; // when the next drawing may be
    this.waiting = new Set();
  }

  /** Shows the path of `conversation`. */
  show(conversation, jump) {
    follow.during(() => keepingFocus(() => this.draw(conversation)));
    if (jump) follow.toEnd();
  }

  draw(conversation) {
    const path = conversation.path();
    const old = this.views;
    this.views = new Map(
      path.map((m) => [m.id, old.get(m.id)?.message === m ? old.get(m.id) : new View(m, this.actions)]),
    );
    const nodes = [...this.views.values()].map((view) => view.node);
    // Moving an element resets what it scrolled and plays; only what differs is touched.
    for (const view of old.values()) if (!nodes.includes(view.node)) view.node.remove();
    nodes.forEach((node, i) => list.children[i] !== node && list.insertBefore(node, list.children[i] ?? null));
    for (const view of this.views.values()) view.update();
  }

  /** Draws a message again, soon. */
  update(message) {
    this.waiting.add(message.id);
    if (this.frame) return;
    const draw = () => {
      this.frame = 0;
      const start = performance.now();
      follow.during(() => keepingFocus(() => this.waiting.forEach((id) => this.views.get(id)?.update())));
      this.waiting.clear();
      // Long answers get a quarter of the time, so that the page stays quick.
      this.due = performance.now() + 3 * (performance.now() - start);
    };
    const wait = this.due - performance.now();
    // A hidden tab gets no frames.
    this.frame = wait > 16 || document.hidden ? setTimeout(draw, Math.max(16, wait)) : requestAnimationFrame(draw);
  }

  /** Starts to edit the last message of the user. */
  editLast() {
    const view = [...this.views.values()].findLast((v) => v.message.role === "user");
    if (view && !answering(view.message.conversation)) view.edit();
  }

  toEnd() {
    follow.toEnd();
  }
}
