#!/usr/bin/env bash
# A streamed chat with nothing but curl. Usage: examples/chat_curl.sh [question] [url]
curl --no-buffer --silent "${2:-http://127.0.0.1:30000}/v1/chat/completions" \
  -H 'Content-Type: application/json' \
  -d "{\"messages\": [{\"role\": \"user\", \"content\": \"${1:-What is the capital of France?}\"}], \"stream\": true, \"max_tokens\": 64}"
