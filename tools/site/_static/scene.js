// Below the first link of a page to a scene of docs/see/, show the scene, in the colours of the site.
document.addEventListener("DOMContentLoaded", () => {
  const link = document.querySelector('article > section a[href*="see/index.html#"]');
  if (!link || location.pathname.includes("README")) return;
  let block = link;
  while (block.parentElement.tagName !== "SECTION") block = block.parentElement;
  const figure = document.createElement("figure");
  const frame = document.createElement("iframe");
  const whole = document.createElement("a");
  figure.className = "see";
  Object.assign(frame, { title: link.textContent, loading: "lazy", height: 560, src: link.href.replace("#", "?embed#") });
  Object.assign(whole, { href: link.href, textContent: document.documentElement.lang === "en" ? "Open the whole page" : "打开整个页面" });
  figure.append(frame, whole);
  block.after(figure);
  const root = document.documentElement;
  const sendTheme = () => frame.contentWindow.postMessage(root.dataset.theme, "*");
  new MutationObserver(sendTheme).observe(root, { attributeFilter: ["data-theme"] });
  addEventListener("message", ({ source, data }) => {
    if (source !== frame.contentWindow) return;
    frame.height = Math.max(frame.height, data); // it does not shrink under the reader
    sendTheme();
  });
});
