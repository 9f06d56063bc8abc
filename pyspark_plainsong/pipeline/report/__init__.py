"""The job `report`: queue sizes, throughput, publish-to-visible latency and hold times over a time range."""
