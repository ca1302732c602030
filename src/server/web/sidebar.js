// The list of conversations: by age, searched, renamed, deleted. On narrow screens it is a drawer.

import { answering } from "./answers.js";
import { byId, el, icon, iconButton } from "./dom.js";
import { search } from "./store.js";

const DAY = 24 * 60 * 60 * 1000;
const narrow = matchMedia("(max-width: 52rem)");
const field = byId("search");
const menu = byId("menu");

/** What heads the conversations of that age. */
function group(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / DAY);
  if (days < 1) return "Today";
  if (days < 2) return "Yesterday";
  if (days < 8) return "Last seven days";
  return new Date(time).toLocaleDateString("en", { month: "long", year: "numeric" });
}

export class Sidebar {
  /** `actions`: `create`, `rename(id, title)`, `remove(id)`, `save(id)`. */
  constructor(actions) {
    this.actions = actions;
    this.records = [];
    this.current = null;
    this.found = null; // ids that match the search
    byId("new").addEventListener("click", () => actions.create());
    byId("open-sidebar").addEventListener("click", () => this.toggle(true));
    byId("close-sidebar").addEventListener("click", () => this.toggle(false));
    byId("scrim").addEventListener("click", () => this.toggle(false));
    byId("sidebar").addEventListener(
      "keydown",
      (event) => event.key === "Escape" && narrow.matches && this.toggle(false),
    );
    field.addEventListener("input", () => this.search());
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !field.value) return;
      event.stopPropagation();
      field.value = "";
      this.search();
    });
    narrow.addEventListener("change", () => this.toggle(false));
    menu.addEventListener("keydown", (event) => this.moveInMenu(event));
    this.toggle(false);
  }

  toggle(open) {
    const drawer = open && narrow.matches;
    document.body.classList.toggle("drawer", drawer);
    byId("sidebar").inert = narrow.matches && !open;
    byId("main").inert = drawer;
    byId("open-sidebar").setAttribute("aria-expanded", drawer);
    if (drawer) byId("close-sidebar").focus();
    else if (narrow.matches && byId("sidebar").contains(document.activeElement)) byId("open-sidebar").focus();
  }

  async search() {
    const words = field.value.trim();
    const found = words ? await search(words) : null;
    if (words !== field.value.trim()) return; // more was typed meanwhile
    this.found = found;
    this.draw();
  }

  focusSearch() {
    this.toggle(true);
    field.select();
  }

  /** Shows these records, latest first. */
  show(records, current) {
    this.records = records;
    this.current = current;
    this.draw();
  }

  draw() {
    if (byId("conversations").querySelector(".renaming")) return; // it draws when that is over
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const shown = this.found ? this.records.filter((r) => this.found.has(r.id)) : this.records;
    const sections = [];
    let title = null;
    for (const record of shown) {
      if (group(record.updated) !== title) {
        title = group(record.updated);
        sections.push(el("section", {}, el("h2", { text: title }), el("ul")));
      }
      sections.at(-1).lastChild.append(this.item(record));
    }
    if (!shown.length)
      sections.push(
        el("p", {
          class: "quiet none",
          text: this.found ? "Nothing found." : "Conversations are kept here, in this browser.",
        }),
      );
    byId("conversations").replaceChildren(...sections);
    if (focused) byId("conversations").querySelector(`[data-id="${focused}"] a`)?.focus();
  }

  item(record) {
    const link = el("a", {
      href: `#${record.id}`,
      "aria-current": record.id === this.current ? "page" : null,
      title: record.title,
      text: record.title,
      onclick: () => this.toggle(false),
    });
    const more = iconButton("more", `More about ${record.title}`, () => this.openMenu(more, record), {
      "aria-haspopup": "menu",
    });
    const item = el("li", { "data-id": record.id, class: answering(record.id) ? "answering" : null }, link, more);
    link.addEventListener("dblclick", () => this.rename(record));
    return item;
  }

  openMenu(button, record) {
    const entry = (name, label, act) =>
      el("button", { type: "button", role: "menuitem", onclick: () => (menu.hidePopover(), act()) }, icon(name), label);
    menu.replaceChildren(
      entry("edit", "Rename", () => this.rename(record)),
      entry("save", "Export", () => this.actions.save(record.id)),
      entry("trash", "Delete", () => this.actions.remove(record.id)));
    const place = button.getBoundingClientRect();
    menu.showPopover();
    menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - menu.offsetWidth - 8))}px`;
    const fits = place.bottom + menu.offsetHeight <= innerHeight - 8;
    menu.style.top = `${fits ? place.bottom + 4 : place.top - menu.offsetHeight - 4}px`;
    menu.addEventListener(
      "toggle",
      () => button.isConnected && menu.contains(document.activeElement) && button.focus(),
      { once: true },
    );
    menu.firstChild.focus();
  }

  moveInMenu(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...menu.children];
    all.at((all.indexOf(document.activeElement) + step) % all.length).focus();
  }

  rename(record) {
    const item = byId("conversations").querySelector(`[data-id="${record.id}"]`);
    if (!item) return;
    const input = el("input", { class: "renaming", "aria-label": "Name of the conversation", maxlength: 200 });
    input.value = record.title;
    let over = false;
    const close = (keep) => {
      if (over) return;
      over = true;
      input.remove();
      if (keep && input.value.trim() && input.value.trim() !== record.title)
        this.actions.rename(record.id, input.value.trim());
      this.draw();
      byId("conversations").querySelector(`[data-id="${record.id}"] a`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) close(true);
      else if (event.key === "Escape") close(false);
      else return;
      event.stopPropagation();
    });
    input.addEventListener("blur", () => close(true));
    item.replaceChildren(input);
    input.select();
  }
}
