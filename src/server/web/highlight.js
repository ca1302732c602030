// Code in colours, by highlight.js, which is fetched when the first code is shown. Its tree becomes nodes here.

const MAX_CHARS = 20_000; // longer code is shown plain: some languages take the square of its length
const PLAIN = new Set(["markdown", "md", "text", "txt", "plaintext"]);
/** What the beginning of a scope is drawn as; the first that fits. */
const CLASSES = [
  [/^(comment|doctag|quote)/, "comment"],
  [/^(string|regexp|char|link)/, "string"],
  [/^(number|symbol)/, "number"],
  [/^(title\.class|type|built_in|class)/, "type"],
  [/^title/, "call"],
  [/^(keyword|literal|section|name|selector|variable\.language)/, "keyword"],
  [/^(attr|property|meta)/, "attribute"],
  [/^addition/, "added"],
  [/^deletion/, "removed"],
];

let hljs;
let loading;

/** Fetches highlight.js, once. */
export function load() {
  return (loading ??= import("./vendor/highlight.js").then((module) => {
    hljs = module.default;
    for (const code of document.querySelectorAll("code[data-language]"))
      highlight(code, code.textContent, code.dataset.language);
  }));
}

/** `code`, an element that shows a text in the colours of its language, as soon as it can. */
export function highlight(code, text, language) {
  code.textContent = text;
  if (!language || PLAIN.has(language) || text.length > MAX_CHARS) return code;
  code.dataset.language = language;
  if (!hljs) load();
  else if (hljs.getLanguage(language)) {
    const { _emitter } = hljs.highlight(text, { language, ignoreIllegals: true });
    code.replaceChildren(...nodes(_emitter.rootNode));
  }
  return code;
}

/** The nodes of a scope's children: an element for each that is drawn in a colour, text for what is not. */
function nodes({ children }) {
  return children.flatMap((child) => {
    if (typeof child === "string") return [child];
    const found = CLASSES.find(([pattern]) => pattern.test(child.scope ?? ""));
    if (!found) return nodes(child);
    const span = document.createElement("span");
    span.className = `hl-${found[1]}`;
    span.append(...nodes(child));
    return [span];
  });
}
