// Runs before the first paint, so that a dark page never flashes white.
try {
  document.documentElement.dataset.theme = JSON.parse(localStorage.getItem("moebius.theme")) ?? "system";
} catch {
  document.documentElement.dataset.theme = "system";
}
