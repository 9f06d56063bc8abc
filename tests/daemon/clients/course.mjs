// Creates a topic, publishes twice and polls, with Node's fetch and then its http module. Prints a status a line.
import http from "node:http";

const topic = process.argv[2];
const headers = { "Content-Type": "application/json" };
const withFetch = async (method, url, body) => {
  const answer = await fetch(url, { method, headers, body });
  console.log(answer.status, await answer.text());
};
const withHttp = (method, url, body) =>
  new Promise((resolve, reject) => {
    const request = http.request(url, { method, headers }, async (answer) => {
      let text = "";
      for await (const piece of answer) text += piece;
      console.log(answer.statusCode, text);
      resolve();
    });
    request.on("error", reject);
    request.end(body);
  });
await withFetch("PUT", topic, "");
await withFetch("POST", topic + "/publish", '{"messages": ["one"]}');
await withHttp("POST", topic + "/publish", '{"messages": ["two"]}');
await withFetch("POST", topic + "/poll", "{}");
