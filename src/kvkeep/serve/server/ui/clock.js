// The server's clock; this machine's may differ.

let ahead = 0;
export const setClock = (at) => {
  ahead = at - Date.now() / 1000;
};
export const now = () => Date.now() / 1000 + ahead;
