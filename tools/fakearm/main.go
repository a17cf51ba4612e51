// fakearm serves Azure's official fake servers, which are generated from Azure's specification, over TLS. It takes requests
// from any client, finds the operation that each is, and refuses what does not fit the operation's types: a field the
// specification does not have, a value of another type, a path or query it does not know.
//
// When ready it prints one line of JSON with "url" and "ca" (a file). Each request is printed as a line of JSON with
// "method", "path", "operation" and, if it was refused, "refused".
package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/runtime"
)

func main() {
	ca := flag.String("ca-file", "", "file to write the certificate to")
	flag.Parse()
	if err := serve(*ca); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func serve(ca string) error {
	if ca == "" {
		return errors.New("--ca-file is required")
	}
	certificate, pemBytes, err := selfSigned()
	if err != nil {
		return err
	}
	if err := os.WriteFile(ca, pemBytes, 0o644); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	url := fmt.Sprintf("https://localhost:%d", listener.Addr().(*net.TCPAddr).Port)
	line(map[string]string{"url": url, "ca": ca})
	config := &tls.Config{Certificates: []tls.Certificate{certificate}}
	return http.Serve(tls.NewListener(listener, config), &handler{url: url, servers: newServers()})
}

var printing sync.Mutex

func line(value any) {
	printing.Lock()
	defer printing.Unlock()
	text, _ := json.Marshal(value)
	fmt.Println(string(text))
}

type handler struct {
	url     string
	servers map[string]doer
}

type doer interface {
	Do(*http.Request) (*http.Response, error)
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasSuffix(r.URL.Path, "/oauth2/v2.0/token") {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"token_type":"Bearer","expires_in":3600,"ext_expires_in":3600,"access_token":"e30.e30.x"}`)
		return
	}
	record := map[string]string{"method": r.Method, "path": r.URL.RequestURI()}
	operation, status, err := h.pass(w, r)
	record["operation"] = operation
	if err != nil {
		record["refused"] = err.Error()
		body, _ := json.Marshal(map[string]any{"error": map[string]string{"code": "DoesNotFit", "message": err.Error()}})
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		w.Write(body)
	}
	line(record)
}

// pass finds the operation, checks the body against its type, and hands the request to the fake server.
func (h *handler) pass(w http.ResponseWriter, r *http.Request) (string, int, error) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return "", http.StatusBadRequest, err
	}
	route := find(r)
	if route == nil {
		return "", http.StatusBadRequest, fmt.Errorf("no operation of the specification is %s %s", r.Method, r.URL.Path)
	}
	if !strings.HasPrefix(r.Header.Get("Authorization"), "Bearer ") {
		return route.api, http.StatusUnauthorized, errors.New("no bearer token")
	}
	if !apiVersion.MatchString(r.URL.Query().Get("api-version")) {
		return route.api, http.StatusBadRequest, fmt.Errorf("api-version %q", r.URL.Query().Get("api-version"))
	}
	if err := route.fits(r, raw); err != nil {
		return route.api, http.StatusBadRequest, err
	}
	request := r.Clone(context.WithValue(r.Context(), runtime.CtxAPINameKey{}, route.api))
	request.RequestURI = ""
	request.URL.Scheme, request.URL.Host = "https", r.Host
	request.Body = io.NopCloser(bytes.NewReader(raw))
	if route.family == network {
		// The specification spells this provider in lower case; Resource Manager does not care.
		request.URL.Path = strings.Replace(request.URL.Path, "/providers/Microsoft.Compute/", "/providers/microsoft.Compute/", 1)
	}
	response, err := h.servers[route.family].Do(request)
	if err != nil {
		var known *azcore.ResponseError
		if errors.As(err, &known) {
			return route.api, known.StatusCode, err
		}
		return route.api, http.StatusBadRequest, err
	}
	defer response.Body.Close()
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(response.StatusCode)
	if response.StatusCode == http.StatusNoContent {
		return route.api, response.StatusCode, nil
	}
	_, err = io.Copy(w, response.Body)
	return route.api, http.StatusInternalServerError, err
}

func selfSigned() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "fakearm"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		// Trusted as itself: a certificate that may sign others is refused as a server's by strict clients.
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	encoded := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, encoded, nil
}
