// Find a pasted error, whose numbers, hosts and paths no page holds: where no page has all words of
// a query, show the pages that have most of them.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const findAll = Search.performTermsSearch;
  Search.performTermsSearch = (words, excluded) => {
    const all = findAll(words, excluded);
    if (all.length || words.size < 2) return all;
    const pages = new Map();
    for (const word of words) {
      for (const result of findAll(new Set([word]), excluded)) {
        const page = pages.get(result[0]) ?? { result, count: 0 };
        page.count += 1;
        pages.set(result[0], page);
      }
    }
    const most = Math.max(...[...pages.values()].map((page) => page.count));
    return [...pages.values()].filter((page) => page.count === most).map((page) => page.result);
  };
});
