// A click on a figure, or Enter, shows it as large as the window. A click or Escape closes it.
document.addEventListener("DOMContentLoaded", () => {
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.addEventListener("click", () => dialog.close());
  // Sphinx keeps the browser from closing it: it takes Escape for its own marks of a search.
  dialog.addEventListener("keydown", (event) => event.key === "Escape" && dialog.close());
  document.body.append(dialog);
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const button = document.createElement("button");
    button.className = "enlarge";
    image.replaceWith(button);
    button.append(image);
    button.addEventListener("click", () => {
      dialog.replaceChildren(image.cloneNode());
      dialog.showModal();
    });
  }
});
