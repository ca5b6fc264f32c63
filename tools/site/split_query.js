// Split a query as SearchPairs of conf.py splits the pages: Chinese into pairs of characters.
// Sphinx puts this into its search, in place of its own splitQuery().
var splitQuery = (query) =>
  query
    .split(/([\u4e00-\u9fff]+)|[^\p{Letter}\p{Number}_]+/u)
    .filter((part) => part)
    .flatMap((part) =>
      /[\u4e00-\u9fff]{2}/.test(part)
        ? [...part.slice(1)].map((character, k) => part[k] + character)
        : [part],
    );
