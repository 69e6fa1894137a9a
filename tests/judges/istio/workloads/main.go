// Command workloads asks an istiod for what a ztunnel asks, and prints it.
//
// It subscribes to all addresses and authorizations by delta xDS, without TLS, waits until nothing has changed for
// a time, and prints one JSON object a line: {"workload": …}, {"service": …} or {"authorization": …}, as protojson has
// Istio's messages.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"istio.io/istio/pkg/workloadapi"
	"istio.io/istio/pkg/workloadapi/security"
)

const (
	addresses      = "type.googleapis.com/istio.workload.Address"
	authorizations = "type.googleapis.com/istio.security.Authorization"
)

func main() {
	server := flag.String("server", "127.0.0.1:15010", "istiod's plaintext port")
	quiet := flag.Duration("quiet", 3*time.Second, "print when nothing has changed for this time")
	limit := flag.Duration("limit", time.Minute, "give up after this time")
	flag.Parse()
	if err := run(*server, *quiet, *limit); err != nil {
		log.Fatalf("%s: %v", *server, err)
	}
}

func run(server string, quiet, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := grpc.NewClient(server, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).DeltaAggregatedResources(ctx)
	if err != nil {
		return err
	}
	// istiod knows a ztunnel by the first part of its name.
	node := &core.Node{Id: "ztunnel~127.0.0.1~ztunnel.istio-system~istio-system.svc.cluster.local"}
	for _, of := range []string{addresses, authorizations} {
		subscribe := &discovery.DeltaDiscoveryRequest{Node: node, TypeUrl: of, ResourceNamesSubscribe: []string{"*"}}
		if err := stream.Send(subscribe); err != nil {
			return err
		}
	}

	responses, ended := make(chan *discovery.DeltaDiscoveryResponse), make(chan error, 1)
	go func() {
		for {
			response, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			responses <- response
		}
	}()
	known := map[string]map[string]*discovery.Resource{}
	for {
		// Nothing is complete before both types have had an answer.
		var rest <-chan time.Time
		if len(known) == 2 {
			rest = time.After(quiet)
		}
		select {
		case err := <-ended:
			return err
		case <-rest:
			return write(known)
		case response := <-responses:
			of := known[response.TypeUrl]
			if of == nil {
				of = map[string]*discovery.Resource{}
				known[response.TypeUrl] = of
			}
			for _, resource := range response.Resources {
				of[resource.Name] = resource
			}
			for _, name := range response.RemovedResources {
				delete(of, name)
			}
			ack := &discovery.DeltaDiscoveryRequest{TypeUrl: response.TypeUrl, ResponseNonce: response.Nonce}
			if err := stream.Send(ack); err != nil {
				return err
			}
		}
	}
}

func write(known map[string]map[string]*discovery.Resource) error {
	out := json.NewEncoder(os.Stdout)
	for _, resource := range known[addresses] {
		address := &workloadapi.Address{}
		text, err := read(resource, address)
		if err != nil {
			return err
		}
		if err := out.Encode(text); err != nil {
			return err
		}
	}
	for _, resource := range known[authorizations] {
		text, err := read(resource, &security.Authorization{})
		if err != nil {
			return err
		}
		if err := out.Encode(map[string]json.RawMessage{"authorization": text}); err != nil {
			return err
		}
	}
	return nil
}

func read(resource *discovery.Resource, into proto.Message) (json.RawMessage, error) {
	if err := resource.Resource.UnmarshalTo(into); err != nil {
		return nil, fmt.Errorf("%s: %w", resource.Name, err)
	}
	return protojson.Marshal(into)
}
