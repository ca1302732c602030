// The settings dialog: this conversation's system prompt and sampling, how the page looks, the key, the data, the
// server.

import { apiKey, setApiKey } from "./api.js";
import { SAMPLING, readSampling } from "./conversation.js";
import { byId, el, iconButton } from "./dom.js";
import { toast } from "./notices.js";
import { keepSetting, setting } from "./store.js";

const dialog = byId("settings");
const MAX_IMPORT_BYTES = 512 << 20;

/** What new conversations begin with. */
export const defaults = () => {
  const { system, sampling } = setting("defaults", {});
  return { system: typeof system === "string" ? system : "", sampling: readSampling(sampling) };
};

/** Numbers as the server wrote them are f32: 0.7 is 0.699999988. */
const short = (x) => String(Number(x.toPrecision(6)));

/**
 * Opens the dialog. `context`: `record` of the conversation and the served `model`. `actions`: `changed()` after a
 * change to the record, `key()` after another key, `saveAll()`, `load(text)`, `removeAll()`.
 */
export function openSettings({ record, model }, actions, focus = null) {
  const close = () => dialog.close();
  const body = el("div", { class: "sections" },
    conversationSection(record, model, actions),
    lookSection(),
    keySection(actions),
    dataSection(actions),
    serverSection(model),
  );
  dialog.replaceChildren(
    el("header", {}, el("h2", { id: "settings-title", text: "Settings" }), iconButton("close", "Close", close)),
    body,
  );
  // Not the value of an expression: false would keep labels and checkboxes from being clicked.
  dialog.onclick = (event) => {
    if (event.target === dialog) close();
  };
  dialog.showModal();
  if (focus || !matchMedia("(pointer: coarse)").matches) dialog.querySelector(focus ?? "textarea")?.focus();
}

function section(title, ...children) {
  return el("section", { "aria-label": title }, el("h3", { text: title }), ...children);
}

function conversationSection(record, model, actions) {
  const system = el("textarea", {
    id: "system",
    rows: 3,
    placeholder: "How the model should answer, what it should know",
    onchange: () => {
      record.system = system.value;
      actions.changed();
    },
  });
  system.value = record.system;
  const fields = el("div", { class: "fields" }, ...SAMPLING.map((spec) => samplingField(spec, record, model, actions)));
  const thinking = el(
    "select",
    {
      id: "thinking",
      onchange: () => {
        delete record.sampling.thinking;
        if (thinking.value) record.sampling.thinking = thinking.value === "on";
        actions.changed();
      },
    },
    el("option", { value: "", text: "As the model does" }),
    el("option", { value: "on", text: "On" }),
    el("option", { value: "off", text: "Off" }),
  );
  thinking.value = { true: "on", false: "off" }[record.sampling.thinking] ?? "";
  fields.append(field("thinking", "Thinking", "For models that can turn it on and off", thinking));
  const keep = () => {
    keepSetting("defaults", { system: record.system, sampling: record.sampling });
    toast("New conversations will begin with these settings.");
  };
  const reset = () => {
    record.system = "";
    record.sampling = {};
    actions.changed();
    const fresh = conversationSection(record, model, actions);
    node.replaceWith(fresh);
    fresh.querySelector("textarea").focus();
  };
  const node = section(
    "This conversation",
    el("label", { for: "system", text: "System prompt" }),
    system,
    fields,
    el(
      "div",
      { class: "row" },
      el("button", { type: "button", class: "plain", text: "Use for new conversations", onclick: keep }),
      el("button", { type: "button", class: "plain", text: "Reset", onclick: reset }),
    ),
  );
  return node;
}

function field(id, label, about, input) {
  input.setAttribute("aria-describedby", `${id}-about`);
  return el(
    "div",
    { class: "field" },
    el("label", { for: id, text: label }),
    input,
    el("p", { id: `${id}-about`, class: "quiet", text: about }),
  );
}

function samplingField({ name, label, least, most, step, about }, record, model, actions) {
  const standard = name === "max_tokens" ? model?.max_model_len : model?.sampling?.[name];
  const hint =
    name === "max_tokens"
      ? "as long as it fits"
      : name === "seed"
        ? "random"
        : Number.isFinite(standard)
          ? short(standard)
          : "the model's own";
  // `any`: a step would refuse 0.65.
  const input = el("input", {
    id: name,
    type: "number",
    inputmode: step === 1 && name !== "seed" ? "numeric" : "decimal",
    min: least,
    max: most,
    step: step === 1 ? 1 : "any",
    placeholder: hint,
  });
  input.value = record.sampling[name] ?? "";
  const place = field(name, label, about, input);
  input.addEventListener("input", () => {
    const valid = input.validity.valid && (input.value === "" || name in readSampling({ [name]: Number(input.value) }));
    const range =
      most !== undefined
        ? `a number from ${least} to ${most}`
        : least !== undefined
          ? `a whole number of at least ${least}`
          : "a whole number";
    place.lastChild.textContent = valid ? about : `This must be ${range}; the last valid value is used.`;
    place.classList.toggle("invalid", !valid);
    input.setAttribute("aria-invalid", !valid);
    if (!valid) return;
    if (input.value === "") delete record.sampling[name];
    else record.sampling[name] = Number(input.value);
    actions.changed();
  });
  return place;
}

function lookSection() {
  const current = setting("theme", "system");
  const choices = [["system", "As the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, label]) => {
    const input = el("input", { type: "radio", name: "theme", value, id: `theme-${value}`, onchange: () => {
      document.documentElement.dataset.theme = value;
      keepSetting("theme", value === "system" ? undefined : value);
    } });
    input.checked = value === current;
    return [input, el("label", { for: `theme-${value}`, text: label })];
  });
  return section("Look", el("div", { class: "choices", role: "radiogroup", "aria-label": "Look" }, ...choices.flat()));
}

function keySection(actions) {
  const input = el("input", {
    id: "key",
    class: "secret",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "None",
    onchange: () => {
      setApiKey(input.value);
      actions.key();
    },
  });
  input.value = apiKey();
  return section(
    "API key",
    field(
      "key",
      "Key",
      "Only for servers that ask for one. It is kept in this browser and sent to this server alone.",
      input,
    ),
  );
}

function dataSection(actions) {
  const file = el("input", {
    type: "file",
    accept: "application/json,.json",
    class: "offscreen",
    tabindex: "-1",
    "aria-label": "File to import",
    onchange: async () => {
      const [chosen] = file.files;
      file.value = "";
      if (!chosen) return;
      if (chosen.size > MAX_IMPORT_BYTES) toast("Not imported: the file is larger than 512 MiB.");
      else actions.load(await chosen.text());
    },
  });
  return section(
    "Conversations",
    el("p", { class: "quiet", text: "They are kept in this browser only." }),
    el("div", { class: "row" },
      el("button", { type: "button", class: "plain", id: "export", text: "Export all", onclick: actions.saveAll }),
      el("button", { type: "button", class: "plain", text: "Import", onclick: () => file.click() }),
      file,
      el("button", {
        type: "button",
        class: "plain danger",
        text: "Delete all",
        onclick: () => (dialog.close(), actions.removeAll()),
      }),
    ),
  );
}

function serverSection(model) {
  if (!model) return section("Server", el("p", { class: "quiet", text: "Not connected." }));
  const facts = [
    ["Model", model.id],
    ["Architecture", model.architecture],
    ["Device", deviceOf(model)],
    ["Experts", model.experts],
    ["Dense weights", model.dense],
    ["Keys and values", model.kv],
    ["Context", model.max_model_len && `${model.max_model_len.toLocaleString("en")} tokens`],
  ].filter(([, value]) => value);
  return section(
    "Server",
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])),
  );
}

const SIMD = { avx2: "AVX2", "avx-vnni": "AVX-VNNI", avx512: "AVX-512", amx: "AMX" };

/** What computes, in words. */
export function deviceOf({ device, threads, simd }) {
  const cores = threads && `${threads} ${threads === 1 ? "core" : "cores"}${SIMD[simd] ? ` with ${SIMD[simd]}` : ""}`;
  if (!device || device === "cpu") return cores ?? "";
  return cores ? `${device}, ${cores}` : device;
}
