import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Creates a topic, publishes twice and polls, with the JDK's HttpClient at its defaults. Prints a status a line. */
class Course {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        String topic = arguments[0];
        String[][] calls = {
            {"PUT", topic, ""},
            {"POST", topic + "/publish", "{\"messages\": [\"one\"]}"},
            {"POST", topic + "/publish", "{\"messages\": [\"two\"]}"},
            {"POST", topic + "/poll", "{}"},
        };
        for (String[] call : calls) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(call[1]))
                .header("Content-Type", "application/json")
                .method(call[0], HttpRequest.BodyPublishers.ofString(call[2]))
                .build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
