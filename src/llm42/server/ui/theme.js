// Light or dark as chosen before, set before the first paint. Not a module: modules run after it.
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage (private window, file policy): the system's own scheme holds.
}
