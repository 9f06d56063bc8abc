// Creates a topic, publishes twice and polls, with Go's default client. Prints a status a line.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

func main() {
	topic := os.Args[1]
	calls := [][3]string{
		{"PUT", topic, ""},
		{"POST", topic + "/publish", `{"messages": ["one"]}`},
		{"POST", topic + "/publish", `{"messages": ["two"]}`},
		{"POST", topic + "/poll", "{}"},
	}
	for _, call := range calls {
		request, err := http.NewRequest(call[0], call[1], strings.NewReader(call[2]))
		if err != nil {
			panic(err)
		}
		request.Header.Set("Content-Type", "application/json")
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			panic(err)
		}
		body, err := io.ReadAll(answer.Body)
		if err != nil {
			panic(err)
		}
		answer.Body.Close()
		fmt.Println(answer.StatusCode, string(body))
	}
}
