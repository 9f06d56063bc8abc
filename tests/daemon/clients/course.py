"""Creates a topic, publishes twice and polls, with urllib and then http.client. Prints a status a line."""

import http.client
import sys
import urllib.request
from urllib.parse import urlsplit

topic = sys.argv[1]
headers = {"Content-Type": "application/json"}
for method, url, body in (("PUT", topic, b""), ("POST", topic + "/publish", b'{"messages": ["one"]}')):
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method)) as answer:
        print(answer.status, answer.read().decode())
connection = http.client.HTTPConnection(urlsplit(topic).netloc)
for verb, body in (("publish", b'{"messages": ["two"]}'), ("poll", b"{}")):
    connection.request("POST", f"{urlsplit(topic).path}/{verb}", body, headers)
    response = connection.getresponse()
    print(response.status, response.read().decode())
