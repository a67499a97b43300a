// Subscriber prints every alert, and then its changes: `go run .` in this directory.
//
// schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
// of each alert comes first, because the stream keeps it; then come changes as they happen.
//
// As the reader NAME (`muster auth reader --name NAME --out FILE`), set NATS_CREDS=FILE,
// NATS_DOMAIN=muster and NATS_INBOX_PREFIX=_INBOX.reader_NAME.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"time"

	"github.com/nats-io/nats.go"
)

// An event is a CloudEvent; only the fields that are used here are declared.
type event struct {
	Data struct {
		State    string `json:"state"`
		Severity string `json:"severity"`
		Kind     string `json:"kind"`
		Node     string `json:"node"`
		Summary  string `json:"summary"`
	} `json:"data"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := follow(ctx); err != nil {
		log.Fatal(err)
	}
}

func follow(ctx context.Context) error {
	url := os.Getenv("NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	options := []nats.Option{nats.MaxReconnects(-1)}
	if file := os.Getenv("NATS_CREDS"); file != "" {
		options = append(options, nats.UserCredentials(file))
	}
	if prefix := os.Getenv("NATS_INBOX_PREFIX"); prefix != "" {
		options = append(options, nats.CustomInboxPrefix(prefix))
	}
	connection, err := nats.Connect(url, options...)
	if err != nil {
		return err
	}
	defer connection.Close()
	var requests []nats.JSOpt
	if domain := os.Getenv("NATS_DOMAIN"); domain != "" {
		requests = append(requests, nats.Domain(domain))
	}
	stream, err := connection.JetStream(requests...)
	if err != nil {
		return err
	}
	for {
		err := printAlerts(ctx, stream)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, nats.ErrStreamNotFound) {
			return err
		}
		log.Printf("reading the newest alerts again: %v", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// PrintAlerts prints alerts until a request fails, as it does when an outage has ended the consumer.
func printAlerts(ctx context.Context, stream nats.JetStreamContext) error {
	// a reader may only pull messages, through a consumer that the server names
	consumer, err := stream.AddConsumer("MUSTER_ALERTS", &nats.ConsumerConfig{
		FilterSubject:     "muster.alert.>",
		AckPolicy:         nats.AckNonePolicy,
		DeliverPolicy:     nats.DeliverLastPerSubjectPolicy,
		InactiveThreshold: time.Minute,
	})
	if err != nil {
		return err
	}
	bind := nats.Bind("MUSTER_ALERTS", consumer.Name)
	alerts, err := stream.PullSubscribe("", "", bind, nats.SkipConsumerLookup())
	if err != nil {
		return err
	}
	defer alerts.Unsubscribe()
	for {
		messages, err := fetch(ctx, alerts)
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		for _, message := range messages {
			printAlert(message)
		}
	}
}

func fetch(ctx context.Context, alerts *nats.Subscription) ([]*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return alerts.Fetch(100, nats.Context(ctx))
}

func printAlert(message *nats.Msg) {
	var alert event
	if err := json.Unmarshal(message.Data, &alert); err != nil {
		log.Printf("%s: %v", message.Subject, err)
		return
	}
	a := alert.Data
	// %q, because a summary may contain characters that a terminal obeys
	fmt.Println(a.State, a.Severity, a.Kind, a.Node, fmt.Sprintf("%q", a.Summary))
}
