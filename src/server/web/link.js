// Which addresses in a model's text may become links: absolute ones of three harmless kinds, and nothing that a browser
// would run.

const ALLOWED = /^(?:https?:\/\/[^\s/]|mailto:[^\s@]+@)/i;

/** The address if a link may go there, else null. */
export function safe(address) {
  const text = address.trim();
  if (text.length > 4096 || !ALLOWED.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

/** A link that tells its target nothing about this page. */
export function anchor(address) {
  const a = document.createElement("a");
  a.href = address;
  a.target = "_blank";
  a.rel = "noopener noreferrer nofollow";
  return a;
}
