// A picture that reports clicks and arrow keys to Python and shows a mark.
function render({ model, el }) {
  const box = document.createElement("div");
  const image = document.createElement("img");
  const mark = document.createElement("div");
  box.className = "attnlab-picture";
  mark.className = "attnlab-mark";
  image.tabIndex = 0;
  box.append(image, mark);
  el.append(box);

  let url = null;
  const showImage = () => {
    const png = model.get("png");
    box.style.display = png.byteLength ? "" : "none";
    if (!png.byteLength) return;
    const old = url;
    url = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    image.onload = () => old && URL.revokeObjectURL(old);
    image.src = url;
    image.width = model.get("width");
    image.dataset.version = model.get("version");
  };
  const showRest = () => {
    const [left, top, width, height] = model.get("mark");
    mark.style.display = width ? "block" : "none";
    Object.assign(mark.style, {
      left: `${100 * left}%`, top: `${100 * top}%`,
      width: `${100 * width}%`, height: `${100 * height}%`,
    });
    image.alt = model.get("alt");
    image.title = model.get("hint");
    box.classList.toggle("attnlab-stale", model.get("stale"));
  };
  const click = (event) => {
    const { left, top, width, height } = image.getBoundingClientRect();
    model.send({ click: [(event.clientX - left) / width, (event.clientY - top) / height] });
  };
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const press = (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    event.stopPropagation();
    model.send({ step: STEPS[event.key] });
  };
  image.addEventListener("click", click);
  image.addEventListener("keydown", press);
  model.on("change:version", showImage);
  model.on("change:mark change:alt change:hint change:stale", showRest);
  showImage();
  showRest();
  return () => url && URL.revokeObjectURL(url);
}
export default { render };
