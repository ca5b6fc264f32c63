// A result of the search opens at the section that fits the query best, with its words marked.
document.addEventListener("DOMContentLoaded", () => {
  const address = new URLSearchParams(location.search);
  const results = document.getElementById("search-results");
  if (results) {
    const addQuery = (link) => (link.search = `?highlight=${encodeURIComponent(address.get("q"))}`);
    const addQueries = () => results.querySelectorAll("li a").forEach(addQuery);
    new MutationObserver(addQueries).observe(results, { childList: true, subtree: true });
    return;
  }
  const stemmer = new Stemmer();
  const split = (text) => splitQuery(text.toLowerCase());
  const stems = (text) => split(text).map((word) => stemmer.stemWord(word));
  const query = address.get("highlight") ?? "";
  const words = new Set(split(query).filter((word) => word.length > 1 && !stopwords.has(word)));
  const parts = stems(query).filter((word) => !/^\d+$/.test(word));
  if (!parts.length) return;
  parts.push(...parts.slice(1).map((word, k) => `${parts[k]} ${word}`)); // pairs find phrases
  // The element that holds the most parts of the query; the rarer a part, the more it counts.
  const best = (elements, childrenOf) => {
    const texts = elements.map((one) => ` ${childrenOf(one).flatMap((child) => stems(child.textContent)).join(" ")} `);
    const scores = texts.map(() => 0);
    for (const part of new Set(parts)) {
      const having = [...texts.keys()].filter((k) => texts[k].includes(` ${part} `));
      for (const k of having) scores[k] += Math.log((texts.length + 1) / having.length);
    }
    return elements[scores.indexOf(Math.max(...scores))];
  };
  const own = (section) => [...section.children].filter((child) => child.tagName !== "SECTION");
  const sections = [...document.querySelectorAll("article section")];
  const chosen = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const section = chosen?.closest("section") ?? best(sections, own);
  if (!section) return;
  if (!chosen) section.scrollIntoView();
  for (const child of own(section)) {
    for (const word of words) _highlightText(child, word, "highlighted");
  }
  const blocks = [...section.querySelectorAll("tr, li, p, pre")].filter((one) => one.closest("section") === section);
  const block = best(blocks, (one) => [one]);
  if (block?.getBoundingClientRect().bottom > innerHeight) block.scrollIntoView({ block: "center" }); // a row of a long table
});
