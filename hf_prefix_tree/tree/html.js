// One listener for all trees of a document; a node lights up with its ancestors, in the list and in the mask.
if (!window.hptPaths) {
  window.hptPaths = 1;
  document.addEventListener("mouseover", function (event) {
    var hit = event.target.closest(".hpt [data-i]");
    document.querySelectorAll(".hpt .on").forEach(function (e) { e.classList.remove("on"); });
    if (!hit) return;
    var tree = hit.closest(".tree"), i = hit.dataset.i;
    while (i >= 0) {
      var next = -1;
      tree.querySelectorAll('[data-i="' + i + '"]').forEach(function (e) {
        e.classList.add("on");
        next = e.dataset.p;
      });
      i = next;
    }
  });
}
