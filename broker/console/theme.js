// Sets the theme before the style sheet is read, so that no page is first shown in another one.
try {
  document.documentElement.dataset.theme = localStorage.getItem("plainsong-theme") || "auto";
} catch {
  // A browser that keeps nothing for us follows the system.
}
