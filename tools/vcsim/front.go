package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
)

// front is the TLS server that clients see. It can be taken away and brought back, as a vCenter that restarts.
type front struct {
	sync.Mutex
	address, sha1, sha256, pem string
	config                     *tls.Config
	handler                    http.Handler
	server                     *http.Server
}

func listenFront(address string, world *world) (*front, error) {
	certificate, err := certificate(world.options.state)
	if err != nil {
		return nil, err
	}
	raw := certificate.Certificate[0]
	f := &front{
		address: address,
		sha1:    colons(sha1Sum(raw)),
		sha256:  colons(sha256Sum(raw)),
		pem:     string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate[1]})),
		config:  &tls.Config{Certificates: []tls.Certificate{certificate}},
		handler: world,
	}
	return f, f.start()
}

func (f *front) url() string { return "https://" + f.address + "/sdk" }

func (f *front) start() error {
	listener, err := net.Listen("tcp", f.address)
	if err != nil {
		return err
	}
	f.address = listener.Addr().String()
	f.server = &http.Server{Handler: f.handler, ErrorLog: nil}
	go func(server *http.Server) { _ = server.Serve(tls.NewListener(listener, f.config)) }(f.server)
	return nil
}

// restart cuts every connection, calls away, is gone for a while, and listens again on the same port.
func (f *front) restart(down time.Duration, away func() error) error {
	f.Lock()
	defer f.Unlock()
	_ = f.server.Close()
	err := away()
	if err != nil {
		return err
	}
	time.Sleep(down)
	for range 50 {
		if err = f.start(); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}

// signed makes a CA and a certificate for localhost that it signs; the chain has both.
func signed() (tls.Certificate, error) {
	serial := big.NewInt(time.Now().UnixNano())
	from, to := time.Now().Add(-time.Hour), time.Now().Add(10*365*24*time.Hour)
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	ca := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "vcsim CA"}, NotBefore: from, NotAfter: to,
		KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
	}
	caRaw, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	leaf := &x509.Certificate{
		SerialNumber: new(big.Int).Add(serial, big.NewInt(1)), Subject: pkix.Name{CommonName: "localhost"},
		NotBefore: from, NotAfter: to, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
		DNSNames: []string{"localhost"}, IPAddresses: []net.IP{net.ParseIP("127.0.0.1"), net.ParseIP("::1")},
	}
	raw, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{raw, caRaw}, PrivateKey: key}, nil
}

func sha1Sum(raw []byte) []byte   { sum := sha1.Sum(raw); return sum[:] }
func sha256Sum(raw []byte) []byte { sum := sha256.Sum256(raw); return sum[:] }

func colons(sum []byte) string {
	parts := make([]string, len(sum))
	for i, b := range sum {
		parts[i] = fmt.Sprintf("%02X", b)
	}
	return strings.Join(parts, ":")
}

var soapMethod = regexp.MustCompile(`<(?:\w+:)?Body[^>]*>\s*<(?:\w+:)?(\w+)`)

// cloneSpace is the time between two clones. A machine is in its folder for a moment before it has its name, and a clone that
// begins in this moment ends the simulator: "does not have a Name". Clones that take equally long would end together.
const cloneSpace = 3 * time.Millisecond

var clones struct {
	sync.Mutex
	next time.Time
}

func waitForTurn() {
	clones.Lock()
	defer clones.Unlock()
	time.Sleep(time.Until(clones.next))
	clones.next = time.Now().Add(cloneSpace)
}

// ServeHTTP counts the call, applies what rules say about the connection, and hands it to the simulator.
func (w *world) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	name := r.Method + " " + r.URL.Path
	if r.Method == http.MethodPost && (strings.HasPrefix(r.URL.Path, "/sdk") || strings.HasPrefix(r.URL.Path, "/pbm")) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(out, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		if m := soapMethod.FindSubmatch(body); m != nil {
			name = string(m[1])
		}
		if !w.options.anyOrder {
			if err := outOfOrder(body); err != nil {
				http.Error(out, "vcsim: the request is not as the WSDL has it: "+err.Error(), http.StatusBadRequest)
				return
			}
		}
	}
	w.count(name)
	if name == "CloneVM_Task" {
		waitForTurn()
	}
	if ms := w.delay(name); ms > 0 {
		time.Sleep(time.Duration(ms) * time.Millisecond)
	}
	if id := r.Header.Get("vmware-api-session-id"); id != "" && !w.restSession(id) {
		out.WriteHeader(http.StatusUnauthorized)
		return
	}
	if w.outOfSessions(name, r) {
		http.Error(out, "503 Service Unavailable", http.StatusServiceUnavailable)
		return
	}
	if w.libraryTemplate(out, r) {
		return
	}
	switch rule := w.next(name, "status", "close", "lose-answer"); {
	case rule == nil:
		w.service.ServeMux.ServeHTTP(out, r)
	case rule.Kind == "status":
		http.Error(out, rule.Message, rule.Status)
	case rule.Kind == "close":
		panic(http.ErrAbortHandler)
	default: // the call is carried out, its answer is lost
		w.service.ServeMux.ServeHTTP(&nowhere{header: http.Header{}}, r)
		panic(http.ErrAbortHandler)
	}
}

type nowhere struct{ header http.Header }

func (n *nowhere) Header() http.Header         { return n.header }
func (n *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (n *nowhere) WriteHeader(int)             {}
