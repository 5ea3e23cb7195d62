// The server's clock, whatever this machine's says.

let ahead = 0;
export const setClock = (at) => {
  ahead = at - Date.now() / 1000;
};
export const now = () => Date.now() / 1000 + ahead;
