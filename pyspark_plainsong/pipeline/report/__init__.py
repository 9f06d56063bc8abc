"""The job `report`: queue sizes, throughput, publish-to-visible latency and transaction hold times over a time range."""
