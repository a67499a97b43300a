// Subscriber prints every alert, and then its changes: `go run .` in this directory.
//
// schemas/asyncapi.json describes the subject, schemas/alert.changed.json the data. The newest state
// of each alert comes first, because the stream keeps it; then come changes as they happen.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/signal"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
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
	var options []nats.Option
	if file := os.Getenv("NATS_CREDS"); file != "" {
		options = append(options, nats.UserCredentials(file))
	}
	connection, err := nats.Connect(url, options...)
	if err != nil {
		return err
	}
	defer connection.Close()
	stream, err := jetstream.New(connection)
	if err != nil {
		return err
	}
	alerts, err := stream.OrderedConsumer(ctx, "MUSTER_ALERTS", jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{"muster.alert.>"},
		DeliverPolicy:  jetstream.DeliverLastPerSubjectPolicy,
	})
	if err != nil {
		return err
	}
	consuming, err := alerts.Consume(printAlert)
	if err != nil {
		return err
	}
	defer consuming.Stop()
	<-ctx.Done()
	return nil
}

func printAlert(message jetstream.Msg) {
	var alert event
	if err := json.Unmarshal(message.Data(), &alert); err != nil {
		log.Printf("%s: %v", message.Subject(), err)
		return
	}
	a := alert.Data
	// %q, because a name may contain characters that a terminal obeys
	fmt.Println(a.State, a.Severity, a.Kind, a.Node, fmt.Sprintf("%q", a.Summary))
}
