// What the page says beside the conversation: banners that stay, toasts that go, and words for screen readers.

import { byId, el, iconButton } from "./dom.js";

/** Shows a banner under the header, in place of one with the same id. `actions`: pairs of label and function. */
export function banner(id, text, actions = []) {
  clearBanner(id);
  const buttons = actions.map(([label, act]) =>
    el("button", { type: "button", class: "plain", text: label, onclick: act }),
  );
  byId("banners").append(el("div", { class: "banner", "data-id": id }, el("span", { text }), ...buttons));
}

export function clearBanner(id) {
  const found = [...byId("banners").children].find((node) => node.dataset.id === id);
  found?.remove();
  return Boolean(found);
}

/** Says something for a while; `action`: a label and what its button does. */
export function toast(text, action = null, seconds = action ? 10 : 4) {
  const close = () => {
    clearTimeout(timer);
    node.remove();
  };
  const button =
    action && el("button", { type: "button", class: "plain", text: action[0], onclick: () => (close(), action[1]()) });
  const node = el("div", { class: "toast" }, el("span", { text }), button, iconButton("close", "Dismiss", close));
  let timer = setTimeout(close, seconds * 1000);
  // A user must not have to hurry to reach a button.
  node.addEventListener("focusin", () => clearTimeout(timer));
  node.addEventListener("pointerenter", () => clearTimeout(timer));
  for (const kind of ["focusout", "pointerleave"]) {
    node.addEventListener(kind, () => {
      clearTimeout(timer);
      timer = setTimeout(close, seconds * 1000);
    });
  }
  byId("toasts").replaceChildren(node);
}

/** Tells screen readers. */
export function announce(text) {
  byId("announcer").textContent = text;
}
